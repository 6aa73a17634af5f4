"""What ranks say to each other: one header per step, rows there and back per layer, and weights between steps.

Every rank calls the same functions in the same order. A rank that is lost shows as `RankLost`, after which the group
is of no more use.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from omni_proxy.workers.engine.expert_parallel.experts import ExpertSlots

BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
FOREVER: Final = datetime.timedelta(days=365)
"""Ranks wait for the next step however long that takes; what hangs is ended by the leader's watch."""
RENDEZVOUS: Final = datetime.timedelta(seconds=60)
HOST: Final = "127.0.0.1"


class RankLost(RuntimeError):
    """A rank of the group has died or hangs; no further step is possible."""


class Op(IntEnum):
    STEP = 1
    EXCHANGE = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class Transfer:
    """Slot (rank, slot) of a layer gets the weights that (source, source_slot) holds before the exchange."""

    rank: int
    slot: int
    source: int
    source_slot: int


@contextmanager
def lost_if_broken() -> Iterator[None]:
    """Name what torch.distributed raises when a connection breaks."""
    try:
        yield
    except RuntimeError as exc:
        raise RankLost(f"a rank is gone ({str(exc).splitlines()[0][:200]})") from exc


def leader_store() -> TCPStore:
    """Where ranks find each other; its port was chosen by the system."""
    return TCPStore(HOST, 0, None, True, timeout=RENDEZVOUS, wait_for_workers=False)


def member_store(port: int) -> TCPStore:
    """The store of the leader that chose `port`."""
    return TCPStore(HOST, port, None, False, timeout=RENDEZVOUS)


def join(store: TCPStore, rank: int, ranks: int, device: str = "cpu") -> None:
    """Enter the group; returns when all ranks have."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with lost_if_broken():
        dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=FOREVER)
        dist.barrier()


def leave() -> None:
    """Close the connections of the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def announce(op: Op, layer: int = 0, count: int = 0) -> None:
    """Rank 0 tells the others what comes next."""
    with lost_if_broken():
        dist.broadcast(torch.tensor([op, layer, count]), 0)


def heard() -> tuple[Op, int, int]:
    """What rank 0 has announced."""
    header = torch.zeros(3, dtype=torch.int64)
    with lost_if_broken():
        dist.broadcast(header, 0)
    op, layer, count = header.tolist()
    return Op(op), layer, count


def moe_layer(slots: ExpertSlots, layer: int, rows: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Send `rows`, sorted by (rank, slot) with `counts` [ranks, slots]; compute what comes; return results in order.

    A rank without rows of its own takes part with none.
    """
    sent = torch.from_numpy(np.ascontiguousarray(counts))
    got = torch.empty_like(sent)
    with lost_if_broken():
        dist.all_to_all_single(got, sent)
    there, back = sent.sum(1).tolist(), got.sum(1).tolist()
    arrived = rows.new_empty(sum(back), rows.shape[1])
    with lost_if_broken():
        dist.all_to_all_single(_bytes(arrived), _bytes(rows), back, there)
    results = slots.compute(layer, arrived, got.numpy())
    returned = torch.empty_like(rows)
    with lost_if_broken():
        dist.all_to_all_single(_bytes(returned), _bytes(results), there, back)
    return returned


def announce_transfers(transfers: Sequence[Transfer]) -> None:
    """Rank 0 sends the list that follows an EXCHANGE header."""
    table = [[t.rank, t.slot, t.source, t.source_slot] for t in transfers]
    with lost_if_broken():
        dist.broadcast(torch.tensor(table, dtype=torch.int64), 0)


def heard_transfers(count: int) -> list[Transfer]:
    """The list that rank 0 has sent."""
    table = torch.zeros(count, 4, dtype=torch.int64)
    with lost_if_broken():
        dist.broadcast(table, 0)
    return [Transfer(*row) for row in table.tolist()]


def exchange(slots: ExpertSlots, layer: int, transfers: Sequence[Transfer], me: int) -> None:
    """Carry the weights over. All are read before any is overwritten, so slots may trade places."""
    arriving: list[tuple[int, tuple[Tensor, Tensor]]] = []
    works: list[Any] = []
    with lost_if_broken():
        for nth, transfer in enumerate(transfers):
            if me == transfer.rank == transfer.source:
                pair = slots.packed(layer, transfer.source_slot)
                arriving.append((transfer.slot, (pair[0].clone(), pair[1].clone())))
            elif me == transfer.source:
                for half, tensor in enumerate(slots.packed(layer, transfer.source_slot)):
                    works.append(dist.isend(_bytes(tensor), transfer.rank, tag=2 * nth + half))
            elif me == transfer.rank:
                here = slots.packed(layer, transfer.slot)
                pair = torch.empty_like(here[0]), torch.empty_like(here[1])
                arriving.append((transfer.slot, pair))
                works += [
                    dist.irecv(_bytes(tensor), transfer.source, tag=2 * nth + half) for half, tensor in enumerate(pair)
                ]
        for work in works:
            work.wait()
    for slot, pair in arriving:
        slots.put_packed(layer, slot, pair)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: not every backend knows every dtype."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
