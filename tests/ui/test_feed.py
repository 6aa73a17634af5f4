"""One sample serves all listeners; who is late gets everything again; a fault ends nobody's stream."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import msgspec
import pytest

from omni_proxy.ui.feed import Feed
from omni_proxy.ui.sampler import Sampler


class FakeSampler:
    """Numbers its samples; `watch` is remembered."""

    def __init__(self) -> None:
        self.ticks = 0
        self.watching: list[bool] = []
        self.broken = False

    def watch(self, on: bool) -> None:
        self.watching.append(on)

    def whole(self) -> Any:
        return {"whole": True, "at": self.ticks}

    def tick(self) -> Any:
        self.ticks += 1
        if self.broken:
            self.broken = False
            raise ValueError("broken")
        return {"whole": False, "at": self.ticks}


def feed_of(sampler: FakeSampler) -> Feed:
    return Feed(cast("Sampler", sampler), lambda: False, tick_s=0.01)


def read(event: bytes) -> tuple[bool, int]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    found = msgspec.json.decode(event[6:])
    return found["whole"], found["at"]


async def test_all_hear_the_same_sample() -> None:
    sampler = FakeSampler()
    feed = feed_of(sampler)
    listeners = [feed.listen() for _ in range(5)]
    for listener in listeners:
        assert read(await anext(listener)) == (True, 0)
    heard = await asyncio.gather(*map(anext, listeners))
    assert [read(event) for event in heard] == [(False, 1)] * 5
    assert sampler.ticks == 1
    assert feed.listeners == 5
    for listener in listeners:
        await listener.aclose()  # type: ignore[attr-defined]
    assert (feed.listeners, sampler.watching) == (0, [True, False])
    await asyncio.sleep(0.05)
    assert sampler.ticks == 1


async def test_who_is_late_gets_everything_again() -> None:
    feed = feed_of(FakeSampler())
    slow, quick = feed.listen(), feed.listen()
    await anext(slow)
    await anext(quick)
    for number in range(1, 4):
        assert read(await anext(quick)) == (False, number)
    whole, at = read(await anext(slow))
    assert whole
    assert at >= 4
    assert read(await anext(slow)) == (False, at + 1)
    for listener in (slow, quick):
        await listener.aclose()  # type: ignore[attr-defined]


async def test_a_fault_in_one_sample_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sampler = FakeSampler()
    listener = feed_of(sampler).listen()
    await anext(listener)
    sampler.broken = True
    with caplog.at_level(logging.ERROR):
        assert read(await anext(listener)) == (False, 2)
    assert "could not be told" in caplog.text
    await listener.aclose()  # type: ignore[attr-defined]


async def test_who_hangs_up_ends_every_stream_once() -> None:
    feed = feed_of(FakeSampler())
    listener = feed.listen()
    await anext(listener)
    feed.hang_up()
    waiting = asyncio.ensure_future(anext(listener, None))
    await asyncio.sleep(0)
    feed.hang_up()
    assert await waiting is None
    assert feed.listeners == 0
