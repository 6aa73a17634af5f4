"""A rank other than 0: a process that holds experts and computes what it is sent, until it is told to stop.

Started by `group.py`, which writes one JSON line to its standard input and holds that open for as long as it lives. It
says `loaded` on standard output when its weights are there, or one line beginning with `failed:`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_proxy.workers.engine.expert_parallel import wire
from omni_proxy.workers.engine.expert_parallel.experts import ExpertSlots
from omni_proxy.workers.engine.expert_parallel.weights import load_slots
from omni_proxy.workers.engine.hf_config import read_config

EXIT_OK, EXIT_LOST, EXIT_FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank is told at its start; `held` [MoE layers][slots] are its experts, -1 for none."""

    model: str
    dtype: str
    threads: int
    rank: int
    ranks: int
    port: int
    held: list[list[int]]


def main() -> None:
    """Never returns: torch's threads are not waited for."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader decides when a rank ends
        signal.signal(number, signal.SIG_IGN)
    order = RankOrder(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_leader, name="leader-watch", daemon=True).start()
    os._exit(_run(order))


def _end_with_leader() -> None:
    while sys.stdin.readline():
        pass
    os._exit(EXIT_LOST)


def _run(order: RankOrder) -> int:
    torch.set_num_threads(order.threads)
    try:
        folder = Path(order.model)
        slots = load_slots(folder, read_config(folder), order.held, getattr(torch, order.dtype))
        _say("loaded")
        wire.join(wire.member_store(order.port), order.rank, order.ranks)
    except (ValueError, OSError, RuntimeError, MemoryError) as exc:
        _say(f"failed: {' '.join(str(exc).split())}")
        return EXIT_FAILED
    try:
        serve(slots, order)
    except wire.RankLost:
        return EXIT_LOST
    return EXIT_OK


@torch.inference_mode()
def serve(slots: ExpertSlots, order: RankOrder) -> None:
    """Follow rank 0 through steps and exchanges until STOP."""
    layers, width = len(order.held), len(order.held[0])
    nothing = torch.zeros(0, slots.hidden, dtype=slots.dtype)
    none: Any = np.zeros((order.ranks, width), np.int64)
    while True:
        op, layer, count = wire.heard()
        if op is wire.Op.STOP:
            return
        if op is wire.Op.EXCHANGE:
            wire.exchange(slots, layer, wire.heard_transfers(count), order.rank)
            continue
        for at in range(layers):
            wire.moe_layer(slots, at, nothing, none)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
