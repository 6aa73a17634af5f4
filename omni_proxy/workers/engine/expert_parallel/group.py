"""The processes of an expert-parallel group, seen from rank 0: starts them, watches them, ends them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from omni_proxy.workers.engine.expert_parallel import wire
from omni_proxy.workers.engine.expert_parallel.rank import RankOrder

STOP_TIMEOUT_S: Final = 5.0


class StartFailed(RuntimeError):
    """A rank could not start; the text is one line."""


class Group:
    """Ranks 1 to N - 1. `on_lost` is called, from another thread, when one ends that was not told to.

    A wait for other ranks that is longer than `hang_timeout_s` means that one hangs: then all are ended.
    """

    def __init__(self, orders: list[RankOrder], on_lost: Callable[[], None], hang_timeout_s: float) -> None:
        self._on_lost = on_lost
        self._hang_timeout_s = hang_timeout_s
        self._stopping = threading.Event()
        self._busy_since: float | None = None
        self.lost = threading.Event()
        self._processes = [_started(order) for order in orders]
        try:
            for order, process in zip(orders, self._processes, strict=True):
                _await_loaded(order, process)
        except BaseException:
            self.kill()
            raise
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name="rank-watch", daemon=True).start()
        threading.Thread(target=self._watch_hang, name="hang-watch", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around anything that waits for other ranks: what hangs in it is ended. Raises RankLost once one is lost."""
        if self.lost.is_set():
            raise wire.RankLost("a rank of this worker has ended")
        self._busy_since = time.monotonic()
        try:
            yield
        except wire.RankLost:
            self.kill()
            raise
        finally:
            self._busy_since = None

    def stop(self) -> None:
        """Wait for ranks that have been told to stop; end those that do not."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        self._stopping.set()
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _watch(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        if not self._stopping.is_set():
            self.lost.set()
            self._on_lost()

    def _watch_hang(self) -> None:
        while not self._stopping.wait(self._hang_timeout_s / 4):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._hang_timeout_s:
                self.lost.set()
                for process in self._processes:
                    process.kill()
                return


def _started(order: RankOrder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_proxy.workers.engine.expert_parallel.rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: _await_loaded says so
        process.stdin.write(json.dumps(asdict(order)) + "\n")
        process.stdin.flush()
    return process


def _await_loaded(order: RankOrder, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != "loaded":
        raise StartFailed(f"expert rank {order.rank}: {line.removeprefix('failed: ') or 'ended while it loaded'}")
