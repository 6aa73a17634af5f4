"""The socket between a front and the scheduler: batches of messages, each frame a length and a msgpack array.

What is sent within one turn of the event loop leaves as one frame: under load a frame carries many messages, so that
the price of a system call is shared.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from omni_proxy.messages import Effect, Event
from omni_proxy.messages.wire import from_wire, to_wire, wire_type
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.workers.member import Member

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("!I")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front's first word: the prefix of all its request ids."""

    rid_prefix: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front's last word: it ends because it was asked to."""


class EdgeRejected(msgspec.Struct, frozen=True, tag=True):
    """A front refused a request that the core never heard of; for the metrics."""

    endpoint: str
    error: str


class Members(msgspec.Struct, frozen=True, tag=True):
    """All members, whenever one comes, goes or moves."""

    members: tuple[Member, ...]


FromFront = Hello | Goodbye | EdgeRejected | EdgeNews | Event
FromScheduler = Members | Effect

Received = TypeVar("Received")


class Link(asyncio.Protocol, Generic[Received]):
    """One end. `received` gets each batch of messages in order; `lost` is called once."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[Any]],
        received: Callable[[Link[Received], Sequence[Received]], None],
        lost: Callable[[Link[Received]], None],
    ) -> None:
        self._decoder = decoder
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._out: list[Any] = []
        self._in = bytearray()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def send(self, message: object) -> None:
        """Queue a message for this turn's frame; dropped when the other side is gone."""
        if self._transport is None:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(to_wire(message))

    def close(self) -> None:
        """Flush what is queued and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None:
            frame = self._encoder.encode(out)
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    # ----------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._in += data
        at = 0
        while len(self._in) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, at)
            end = at + _LENGTH.size + length
            if length > MAX_FRAME_BYTES:
                self._break()
                return
            if len(self._in) < end:
                break
            frame = bytes(self._in[at + _LENGTH.size : end])
            at = end
            try:
                messages: list[Received] = [from_wire(read) for read in self._decoder.decode(frame)]
            except msgspec.DecodeError:
                self._break()
                return
            self._received(self, messages)
        del self._in[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        self._lost(self)

    def _break(self) -> None:
        """The other side does not speak our language: nothing that it says can be trusted."""
        if self._transport is not None:
            self._transport.abort()


def front_decoder() -> msgspec.msgpack.Decoder[list[Any]]:
    """Reads what a scheduler sends: `FromScheduler`, as it is on the wire."""
    return msgspec.msgpack.Decoder(list[wire_type(FromScheduler)])  # type: ignore[misc]


def scheduler_decoder() -> msgspec.msgpack.Decoder[list[Any]]:
    """Reads what a front sends: `FromFront`, as it is on the wire."""
    return msgspec.msgpack.Decoder(list[wire_type(FromFront)])  # type: ignore[misc]
