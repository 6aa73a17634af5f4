"""The socket between a front and the scheduler, at every byte and with what does not belong there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from omni_proxy.messages import Abort, Cancelled, DecodeDone, Lease, Leg, LegSent, Usage
from omni_proxy.processes.link import MAX_FRAME_BYTES, Link
from omni_proxy.processes.words import Goodbye, Hello, front_decoder, scheduler_decoder

P, D = Lease("f0-1", 1, "p0", Leg.PREFILL), Lease("f0-1", 2, "d0", Leg.DECODE)
SAID = [Hello("f0-"), LegSent(P), Cancelled("f0-2"), DecodeDone(D, Usage(1, 2, None)), Goodbye()]


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Heard:
    """What a link has brought, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.lost = 0

    def received(self, link: Link, messages: Sequence[Any]) -> None:
        self.batches.append(list(messages))

    def on_lost(self, link: Link) -> None:
        self.lost += 1


def _link(heard: Heard, wire: Wire, decoder: msgspec.msgpack.Decoder[Any] | None = None) -> Link:
    link = Link(decoder or scheduler_decoder(), heard.received, heard.on_lost)
    link.connection_made(wire)  # type: ignore[arg-type]
    return link


async def _frames(*batches: Sequence[object]) -> bytes:
    """What a front writes, each batch in a turn of its own."""
    wire = Wire()
    link = _link(Heard(), wire)
    for batch in batches:
        for message in batch:
            link.send(message)
        await asyncio.sleep(0)
    return wire.written


async def test_what_is_said_in_one_turn_is_one_batch_on_the_other_side() -> None:
    heard = Heard()
    _link(heard, Wire()).data_received(await _frames(SAID[:3], SAID[3:]))
    assert heard.batches == [SAID[:3], SAID[3:]]


async def test_frames_may_come_in_any_pieces() -> None:
    data = await _frames(SAID[:3], SAID[3:])
    for size in (1, 2, 3, 5, 7, 64):
        heard = Heard()
        link = _link(heard, Wire())
        for at in range(0, len(data), size):
            link.data_received(data[at : at + size])
        assert heard.batches == [SAID[:3], SAID[3:]]


async def test_a_large_frame_comes_in_many_pieces() -> None:
    leases = [Lease(f"f0-{number}", 1, "p0", Leg.PREFILL) for number in range(20_000)]
    data = await _frames([LegSent(lease) for lease in leases], [Goodbye()])
    heard = Heard()
    link = _link(heard, Wire())
    for at in range(0, len(data), 1 << 12):
        link.data_received(data[at : at + (1 << 12)])
    assert [message.lease for message in heard.batches[0]] == leases
    assert heard.batches[1] == [Goodbye()]


async def test_a_scheduler_is_understood_by_a_front() -> None:
    wire, heard = Wire(), Heard()
    link = _link(Heard(), wire)
    link.send(Abort(P))
    link.close()
    assert wire.closed
    _link(heard, Wire(), front_decoder()).data_received(wire.written)
    assert heard.batches == [[Abort(P)]]


def _framed(items: object) -> bytes:
    frame = msgspec.msgpack.encode(items)
    return len(frame).to_bytes(4, "big") + frame


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x02\xff\xc1",
        _framed(7),
        _framed(["text"]),
        _framed([[99, "r"]]),
        _framed([[2, "r", 1, "p0"]]),
        _framed([b"\x81\xa4type\xa4What"]),
    ],
    ids=["too large", "no msgpack", "no list", "no row", "no kind", "half a row", "no struct"],
)
async def test_who_speaks_another_language_is_left(data: bytes) -> None:
    heard, wire = Heard(), Wire()
    _link(heard, wire).data_received(data)
    assert wire.aborted
    assert heard.batches == []


async def test_what_is_sent_after_the_other_side_has_gone_is_dropped() -> None:
    heard, wire = Heard(), Wire()
    link = _link(heard, wire)
    link.send(SAID[0])
    link.connection_lost(None)
    link.send(SAID[1])
    await asyncio.sleep(0)
    assert (heard.lost, wire.written, link.connected) == (1, b"", False)
