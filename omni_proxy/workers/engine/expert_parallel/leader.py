"""Rank 0's side of the MoE layers: routes rows to replicas, and re-places experts while it serves.

Used by the model in place of its own experts. A background thread turns windows of expert loads into placements; the
weights of one layer are exchanged before a step, so that no step waits for more than that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_proxy.workers.engine.expert_parallel import wire
from omni_proxy.workers.engine.expert_parallel.group import Group
from omni_proxy.workers.engine.expert_parallel.rank import RankOrder
from omni_proxy.workers.engine.expert_parallel.routing import LayerRouter
from omni_proxy.workers.engine.expert_parallel.weights import load_slots
from omni_proxy.workers.engine.hf_config import ModelConfig
from omni_proxy.workers.engine.placement.controller import Controller, ControllerOptions, Step
from omni_proxy.workers.engine.placement.match import Move
from omni_proxy.workers.engine.placement.place import Options, place
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

CONTROLLER_SLACK: Final = 1


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """`window_steps` make a window, 0 keeps the first placement; `redundancy` None is one more slot for each rank."""

    ranks: int
    redundancy: int | None = None
    window_steps: int = 256
    threads: int = 1
    hang_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """`imbalance` is max/mean rows per rank for each MoE layer, over the last whole window or all rows before it."""

    ranks: int
    imbalance: tuple[float, ...]
    copied: int
    rank_rows: tuple[tuple[int, ...], ...]
    """Rows computed since the start [MoE layer][rank]."""


def first_placement(config: ModelConfig, options: ExpertOptions) -> Placement:
    """The placement for equal loads. Raises ValueError or PlacementError."""
    if not config.sparse_layers:
        raise ValueError("expert_parallel: the model has no MoE layers")
    redundancy = options.ranks if options.redundancy is None else options.redundancy
    loads = np.ones((len(config.sparse_layers), config.num_experts))
    return place(loads, Topology(options.ranks), Options(redundancy, Split.PROPORTIONAL))


class ExpertParallel:
    """The experts of all MoE layers, on N ranks of which this process is the first. One thread calls it."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        options: ExpertOptions,
        on_lost: Callable[[], None],
        placement: Placement | None = None,
    ) -> None:
        """Start and join the other ranks. Raises StartFailed, CheckpointError, ValueError or PlacementError."""
        self._layers = {layer: nth for nth, layer in enumerate(sorted(config.sparse_layers))}
        self._experts = config.num_experts
        self._options = options
        placement = placement or first_placement(config, options)
        self._store = wire.leader_store()
        orders = _orders(folder, dtype, options, placement, self._store.port)
        self._group = Group(orders, on_lost, options.hang_timeout_s)
        try:
            self._slots = load_slots(folder, config, placement.slots[:, 0].tolist(), dtype)
            wire.join(self._store, 0, options.ranks)
        except BaseException:
            self._group.kill()
            raise
        self._routers = [LayerRouter(placement, nth) for nth in range(placement.layers)]
        self._at = 0
        """The MoE layer that comes next in this step; 0 between steps."""
        self._window = np.zeros((placement.layers, config.num_experts), np.int64)
        self._window_rows = np.zeros((placement.layers, options.ranks), np.int64)
        self._rank_rows = np.zeros_like(self._window_rows)
        self._imbalance: NDArray[np.float64] | None = None
        self._steps = 0
        self._stopped = False
        self._copied = 0
        self._pending: deque[tuple[int, tuple[Move, ...], Placement]] = deque()
        self._replacing = Replacing(placement) if options.window_steps else None

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over each row's experts of weight · expert(row); layers must come in order, all of them in each step."""
        nth = self._layers[layer]
        with self._group.working():
            if nth == 0:
                self._begin_step()
            self._at = nth
            flat = ids.flatten().numpy()
            route = self._routers[nth].route(flat)
            order = torch.from_numpy(route.order)
            sent = x.index_select(0, order // ids.shape[1])
            pairs = torch.empty_like(sent).index_copy_(0, order, self._layer(nth, sent, route.counts))
        self._count(nth, flat, route.counts)
        return _weighted(pairs.view(*ids.shape, x.shape[1]), weights)

    def stats(self) -> ExpertStats:
        """Safe from any thread; may be one step behind."""
        rows = self._rank_rows
        ratios = self._imbalance if self._imbalance is not None else _ratios(rows)
        return ExpertStats(self._options.ranks, tuple(ratios.tolist()), self._copied, tuple(map(tuple, rows.tolist())))

    def check(self) -> None:
        """Raise RankLost when a rank has ended."""
        if self._group.lost.is_set():
            raise wire.RankLost("a rank of this worker has ended")

    @property
    def pids(self) -> list[int]:
        """Processes of the other ranks."""
        return self._group.pids

    def replace(self, step: Step) -> None:
        """Take over a placement: shares now, the weights of one layer before each of the next steps."""
        for nth, router in enumerate(self._routers):
            if (router.slots == step.placement.slots[nth]).all():
                router.update(step.placement.slots[nth], step.placement.shares[nth])
            else:
                self._pending.append((nth, tuple(move for move in step.moves if move.layer == nth), step.placement))

    def stop(self) -> None:
        """Tell the ranks to end, and wait for them. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._replacing is not None:
            self._replacing.stop()
        try:
            self.check()
            self._end_step()
            wire.announce(wire.Op.STOP)
        except wire.RankLost:
            self._group.kill()
        self._group.stop()
        wire.leave()

    # ------------------------------------------------------------------------------------- a step

    def _begin_step(self) -> None:
        self._end_step()
        if self._replacing is not None and not self._pending:
            step = self._replacing.take()
            if step is not None:
                self.replace(step)
        if self._pending:
            self._exchange(*self._pending.popleft())
        wire.announce(wire.Op.STEP)

    def _end_step(self) -> None:
        """Go through the layers that a failed step has left out: the other ranks wait in them."""
        while self._at:
            width = self._routers[self._at].slots.shape
            self._layer(
                self._at, torch.zeros(0, self._slots.hidden, dtype=self._slots.dtype), np.zeros(width, np.int64)
            )

    def _layer(self, nth: int, rows: Tensor, counts: NDArray[np.int64]) -> Tensor:
        result = wire.moe_layer(self._slots, nth, rows, counts)
        self._at = (nth + 1) % len(self._routers)
        return result

    def _count(self, nth: int, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        rows = counts.sum(axis=1)
        self._window[nth] += np.bincount(ids, minlength=self._experts)
        self._window_rows[nth] += rows
        self._rank_rows[nth] += rows
        if nth == len(self._routers) - 1:
            self._steps += 1
            if self._options.window_steps and self._steps % self._options.window_steps == 0:
                self._end_window()

    def _end_window(self) -> None:
        self._imbalance = _ratios(self._window_rows)
        if self._replacing is not None and not self._pending:
            self._replacing.offer(self._window.astype(np.float64))
        self._window = np.zeros_like(self._window)
        self._window_rows = np.zeros_like(self._window_rows)

    def _exchange(self, nth: int, moves: Sequence[Move], placement: Placement) -> None:
        router = self._routers[nth]
        transfers = _transfers(router, placement.slots[nth], moves)
        if transfers:
            wire.announce(wire.Op.EXCHANGE, nth, len(transfers))
            wire.announce_transfers(transfers)
            wire.exchange(self._slots, nth, transfers, 0)
            self._copied += sum(transfer.rank != transfer.source for transfer in transfers)
        router.update(placement.slots[nth], placement.shares[nth])


class Replacing:
    """The background thread that decides placements from windows of loads."""

    def __init__(self, placement: Placement) -> None:
        self._controller = Controller(placement, ControllerOptions())
        self._windows: Queue[NDArray[np.float64] | None] = Queue(CONTROLLER_SLACK)
        self._steps: deque[Step] = deque()
        self._thread = threading.Thread(target=self._run, name="re-placement", daemon=True)
        self._thread.start()

    def offer(self, window: NDArray[np.float64]) -> None:
        """Hand over a window; it is left out when the one before has not been worked on."""
        if self._steps:
            return
        try:
            self._windows.put_nowait(window)
        except Full:
            return

    def take(self) -> Step | None:
        """The newest decision, once."""
        return self._steps.popleft() if self._steps else None

    def stop(self) -> None:
        self._windows.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (window := self._windows.get()) is not None:
            self._steps.append(self._controller.observe(window))


def _orders(
    folder: Path, dtype: torch.dtype, options: ExpertOptions, placement: Placement, port: int
) -> list[RankOrder]:
    name = str(dtype).removeprefix("torch.")
    return [
        RankOrder(str(folder), name, options.threads, rank, options.ranks, port, placement.slots[:, rank].tolist())
        for rank in range(1, options.ranks)
    ]


def _transfers(router: LayerRouter, slots: NDArray[np.int64], moves: Sequence[Move]) -> list[wire.Transfer]:
    """What each changed slot is filled from: the source of its move, or another slot of the same rank."""
    sources = {(move.rank, move.slot): move.source for move in moves}
    transfers = []
    for rank, slot in np.argwhere((slots != router.slots) & (slots >= 0)).tolist():
        source = sources.get((rank, slot), rank)
        transfers.append(wire.Transfer(rank, slot, source, router.place_of(int(slots[rank, slot]), source)))
    return transfers


def _weighted(pairs: Tensor, weights: Tensor) -> Tensor:
    """Sum over choices [T, K, H] in order, each times its weight [T, K]."""
    scaled = pairs * weights.to(pairs.dtype).unsqueeze(-1)
    total = scaled[:, 0]
    for choice in range(1, scaled.shape[1]):
        total = total + scaled[:, choice]
    return total


def _ratios(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Max/mean of each line; 1 without any rows."""
    means = rows.mean(axis=1)
    ratios: NDArray[np.float64] = np.divide(rows.max(axis=1), means, out=np.ones(len(rows)), where=means > 0)
    return ratios
