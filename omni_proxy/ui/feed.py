"""Server-sent events for all who look: one sample a tick, made once for everybody, and none while nobody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from omni_proxy.ui.sampler import Sampler
from omni_proxy.ui.watched import Watched

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
MAX_LISTENERS: Final = 32


class Feed:
    """One sampler, any number of listeners. Made inside the event loop that it runs on."""

    def __init__(
        self,
        sampler: Sampler,
        ending: Callable[[], bool],
        tick_s: float = TICK_S,
    ) -> None:
        self._sampler = sampler
        self._ending = ending
        """Does the gateway end? Then streams end, too, and hold nobody up."""
        self._tick_s = tick_s
        self.listeners = 0
        self._ticking: asyncio.Task[None] | None = None
        self._number = 0
        self._latest = b""
        self._ticked = asyncio.Event()

    @property
    def watched(self) -> Watched:
        """What is kept of requests while somebody looks."""
        return self._sampler.watched

    @property
    def full(self) -> bool:
        """Are there as many listeners as may be?"""
        return self.listeners >= MAX_LISTENERS

    def state(self) -> bytes:
        """Everything at this instant, as JSON."""
        return msgspec.json.encode(self._sampler.whole())

    def close(self) -> None:
        """Sample no more."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        self._sampler.watch(False)

    def hang_up(self) -> None:
        """End all streams; who looks comes again."""
        self._wake()

    async def listen(self) -> AsyncIterator[bytes]:
        """Events: first everything, then each tick what is new. A listener that was late gets everything again."""
        self.listeners += 1
        try:
            if self._ticking is None:
                self._sampler.watch(True)
                self._ticking = asyncio.create_task(self._tick(), name="page feed")
            heard = self._number
            yield _event(self.state())
            while not self._ending():
                await self._ticked.wait()
                if self._number == heard:  # it has ended
                    return
                late = self._number > heard + 1
                heard = self._number
                yield _event(self.state()) if late else self._latest
        finally:
            self.listeners -= 1
            if not self.listeners:
                self.close()

    async def _tick(self) -> None:
        while not self._ending():
            await asyncio.sleep(self._tick_s)
            try:
                self._latest = _event(msgspec.json.encode(self._sampler.tick()))
            except Exception:
                logger.exception("the page could not be told what has changed")
                continue
            self._number += 1
            self._wake()
        self._wake()

    def _wake(self) -> None:
        """Let everybody go on who waits, and nobody who comes later."""
        woken, self._ticked = self._ticked, asyncio.Event()
        woken.set()


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
