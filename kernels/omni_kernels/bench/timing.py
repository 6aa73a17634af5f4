"""Times and limits of this machine, so that a share of the one by the other means something on a shared machine.

Contestants take turns, the least time of each counts, and the limits are measured in the same turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from omni_kernels import registry

READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best, with the threads in use."""

    read_bytes_s: float
    flop_s: float
    """Of fused multiply-adds in float32 registers."""
    pair_flop_s: float
    """Of products of bfloat16 pairs; `flop_s` where there is no such instruction."""
    quad_flop_s: float
    """Of products of int8 quads; likewise."""
    gemm_flop_s: float
    """Of a large float32 product by torch."""

    def multiplies(self, name: str) -> float:
        """The limit of a contestant's kind of products, by its name."""
        if "w8a16" in name:
            return self.quad_flop_s / 2
        if "w8a8" in name:
            return self.quad_flop_s
        return self.pair_flop_s if "f32" not in name and ("bf16" in name or "int8" in name) else self.flop_s

    def per_s(self) -> dict[str, float]:
        """In the table's units."""
        return {
            "GB/s": self.read_bytes_s / 1e9,
            "GF/s": self.flop_s / 1e9,
            "pairs GF/s": self.pair_flop_s / 1e9,
            "quads GF/s": self.quad_flop_s / 1e9,
            "gemm GF/s": self.gemm_flop_s / 1e9,
        }


def clock() -> Callable[[], float]:
    """CPU time of this thread where it does all the work: others on the machine count less in it than in wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def least(runs: Mapping[str, Callable[[], object]], turns: int, warmed: Collection[str] = ()) -> dict[str, float]:
    """Least seconds of each contestant over `turns` rounds in which each runs once, after one unmeasured round.

    The `warmed` run twice, and the second time counts: else who comes after the read test pays for its cold caches.
    """
    best, now = dict.fromkeys(runs, float("inf")), clock()
    for run in runs.values():
        run()
    for _ in range(turns):
        for name, run in runs.items():
            if name in warmed:
                run()
            start = now()
            run()
            best[name] = min(best[name], now() - start)
    return best


def repeated(run: Callable[[], object], least_s: float = 2e-3) -> tuple[Callable[[], object], int]:
    """`run` as often in a row as fits into `least_s`, so that the clock's own cost vanishes; and how often that is."""
    now = clock()
    run()
    start = now()
    run()
    count = max(1, int(least_s / max(now() - start, 1e-7)))

    def many() -> None:
        for _ in range(count):
            run()

    return many, count


class Machine:
    """Measures the limits again whenever asked: neighbours change them."""

    def __init__(self, gemm: int = 1024) -> None:
        self._library = registry.cpu_library()
        self._data = torch.empty(READ_BYTES, dtype=torch.uint8)
        if self._library is not None:
            self._library.omni_large_pages(self._data.data_ptr(), READ_BYTES)
        self._data.fill_(1)
        self._square = torch.randn(gemm, gemm)

    def runs(self) -> dict[str, Callable[[], object]]:
        """Contestants for `least`, to be read by `limits`."""
        threads = torch.get_num_threads()
        square = self._square
        runs: dict[str, Callable[[], object]] = {"limit: gemm": lambda: square @ square}
        library = self._library
        if library is None:
            runs["limit: read"] = self._data.view(torch.int64).sum
            return runs
        runs["limit: read"] = lambda: library.omni_bench_read(self._data.data_ptr(), READ_BYTES, threads)
        runs["limit: fma"] = lambda: library.omni_bench_fma(self._rounds(), threads)
        if library.omni_bench_pairs(1, threads):
            runs["limit: pairs"] = lambda: library.omni_bench_pairs(self._rounds(), threads)
        if library.omni_bench_quads(1, threads):
            runs["limit: quads"] = lambda: library.omni_bench_quads(self._rounds(), threads)
        return runs

    def limits(self, times: Mapping[str, float]) -> Limits:
        """The limits that times of `runs` stand for."""
        gemm = 2 * self._square.shape[0] ** 3 / times["limit: gemm"]
        fma = gemm
        if self._library is not None:
            fma = max(self._done("fma") / times["limit: fma"], gemm)
        pairs, quads = (
            self._done(name) / times[f"limit: {name}"] if f"limit: {name}" in times else fma
            for name in ("pairs", "quads")
        )
        return Limits(READ_BYTES / times["limit: read"], fma, pairs, quads, gemm)

    def _done(self, name: str) -> float:
        """How many operations one run of a limit does."""
        done: float = getattr(self._library, f"omni_bench_{name}")(self._rounds(), torch.get_num_threads())
        return done

    @staticmethod
    def _rounds() -> int:
        return 1_000_000
