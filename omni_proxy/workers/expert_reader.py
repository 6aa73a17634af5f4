"""Reads expert counters from the workers that have them, rarely and beside the probes. Never on a request's way.

They are asked for `/omni/experts`, not for their metrics: 58 layers × 256 experts are a tenth of a megabyte of JSON and
read at once, where the same in metrics is nearly a megabyte of text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Final, Protocol

import httpx
import msgspec
from msgspec import Meta, Struct

from omni_proxy.observe.expert_loads import ExpertReading
from omni_proxy.tls import TlsError

_OFF_S: Final = 1.0
"""How often somebody looks whether reading was switched on."""


class _Told(Struct):
    """A worker's answer."""

    tokens: tuple[tuple[Annotated[int, Meta(ge=0)], ...], ...]
    imbalance: tuple[Annotated[float, Meta(ge=0)], ...] = ()


_TOLD: Final = msgspec.json.Decoder(_Told)


class Asked(Protocol):
    """A worker that tells of its experts."""

    @property
    def name(self) -> str: ...
    async def experts(self) -> bytes:
        """The body of its `/omni/experts`. Raises httpx.HTTPError, TlsError."""
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
                body = await worker.experts()
            except (httpx.HTTPError, TlsError):
                continue  # probes tell whether it lives
            reading = _reading(body)
            if reading is not None:
                self._told(worker.name, reading, time.monotonic())


def _reading(body: bytes) -> ExpertReading | None:
    """None where the counters are no full table of layers and experts: then they are not what we think."""
    try:
        told = _TOLD.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    widths = {len(row) for row in told.tokens} - {0}
    return ExpertReading(told.tokens, told.imbalance) if len(widths) == 1 else None
