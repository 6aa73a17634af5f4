"""Reads expert counters from the workers that have them, rarely and beside the probes. Never on a request's way.

The metrics of a large model are a megabyte of text (58 layers × 256 experts): they are read in small parts, so that
the loop that schedules is never held up for longer than one of them takes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import httpx

from omni_proxy.observe.expert_loads import ExpertReading
from omni_proxy.tls import TlsError

logger = logging.getLogger(__name__)

METRIC: Final = b"omni_expert_tokens_total{"
_PART_BYTES: Final = 32 << 10
_SAMPLE: Final = re.compile(rb"^(omni_expert_tokens_total|omni_expert_imbalance)\{([^}\n]*)\} (\S+)", re.MULTILINE)
_LAYER: Final = re.compile(rb'\blayer="(\d{1,4})"')
_EXPERT: Final = re.compile(rb'\bexpert="(\d{1,4})"')
_OFF_S: Final = 1.0
"""How often somebody looks whether reading was switched on."""


class Asked(Protocol):
    """A worker that tells of its experts."""

    @property
    def name(self) -> str: ...
    async def metrics(self) -> bytes:
        """The body of its `/metrics`. Raises httpx.HTTPError, TlsError."""
        ...


class ExpertReader:
    """Asks everyone in turn. `interval_s` None: nobody is asked."""

    def __init__(
        self,
        asked: Callable[[], Iterable[Asked]],
        told: Callable[[str, ExpertReading, float], None],
        interval_s: float | None,
    ) -> None:
        self._asked = asked
        self._told = told
        self.interval_s = interval_s
        """May be changed at any time."""

    async def run(self) -> None:
        """Read again and again; runs until cancelled."""
        last = time.monotonic()
        while True:
            interval = self.interval_s
            await asyncio.sleep(_OFF_S if interval is None else min(interval, _OFF_S))
            if interval is not None and time.monotonic() - last >= interval:
                await self.read_all()
                last = time.monotonic()

    async def read_all(self) -> None:
        """Ask each worker once."""
        for worker in list(self._asked()):
            try:
                body = await worker.metrics()
            except (httpx.HTTPError, TlsError):
                continue  # probes tell whether it lives
            reading = await _read(body)
            if reading is not None:
                self._told(worker.name, reading, time.monotonic())


async def _read(body: bytes) -> ExpertReading | None:
    tokens: dict[int, dict[int, int]] = {}
    ranks: dict[int, float] = {}
    for part in _parts(body):
        for found in _SAMPLE.finditer(part):
            layer, value = _LAYER.search(found[2]), _number(found[3])
            if layer is None or value is None:
                continue
            if found[1] == b"omni_expert_imbalance":
                ranks[int(layer[1])] = value
            elif (expert := _EXPERT.search(found[2])) is not None:
                tokens.setdefault(int(layer[1]), {})[int(expert[1])] = int(value)
        await asyncio.sleep(0)
    return _reading(tokens, ranks)


def _parts(body: bytes) -> Iterator[bytes]:
    """Whole lines, and only where the counters are."""
    at = max(
        0, min((found for name in (METRIC, b"omni_expert_imbalance{") if (found := body.find(name)) >= 0), default=0)
    )
    while at < len(body):
        end = body.find(b"\n", at + _PART_BYTES)
        end = len(body) if end < 0 else end + 1
        yield body[at:end]
        at = end


def _reading(tokens: dict[int, dict[int, int]], ranks: dict[int, float]) -> ExpertReading | None:
    """None where the counters are no full table of layers and experts: then they are not what we think."""
    experts = 1 + max((max(row) for row in tokens.values()), default=-1)
    if not tokens or any(len(row) != experts for row in tokens.values()):
        return None
    numbers, empty = range(experts), dict[int, int]()
    rows = (tokens.get(layer, empty) for layer in range(1 + max(tokens)))
    table = tuple(tuple(map(row.__getitem__, numbers)) if row else () for row in rows)
    return ExpertReading(table, tuple(ranks[layer] for layer in sorted(ranks)))


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value < 2**63 else None
