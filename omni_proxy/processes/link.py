"""The socket between a front and the scheduler: batches of messages, each frame a length and a msgpack array.

What is sent within one turn of the event loop leaves as one frame: under load a frame carries many messages, so that
the price of a system call is shared. In a frame what every request brings is a row (`messages.packed`), and the rest
the bytes of a tagged struct.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec

from omni_proxy.messages.packed import pack, unpack

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH_BYTES: Final = 4
_NO_MESSAGE: Final = (msgspec.MsgspecError, TypeError, ValueError, IndexError, KeyError)


class Link:
    """One end. `received` gets each batch of messages in order; `lost` is called once.

    An asyncio protocol by its methods, not by its base: without one its attributes compile to struct fields.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        received: Callable[[Link, Sequence[Any]], None],
        lost: Callable[[Link], None],
    ) -> None:
        """`decoder` reads the structs that the other side sends."""
        self._rare = decoder
        self._rows: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._out: list[Any] = []
        self._in: list[bytes] = []
        """The parts of a frame that has begun to come, `_have` bytes of at least `_needs`."""
        self._have = 0
        self._needs = 0

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def send(self, message: object) -> None:
        """Queue a message for this turn's frame; dropped when the other side is gone."""
        if self._transport is None:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        row = pack(message)
        self._out.append(self._encoder.encode(message) if row is None else row)

    def close(self) -> None:
        """Flush what is queued and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        out = self._out
        self._out = []
        if out and self._transport is not None:
            frame = self._encoder.encode(out)
            self._transport.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    # ----------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._in:
            self._in.append(data)
            self._have += len(data)
            if self._have < self._needs:
                return
            data = b"".join(self._in)
            self._in = []
        at, needs = 0, _LENGTH_BYTES
        while len(data) - at >= _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            end = begin + int.from_bytes(data[at:begin], "big")
            if end - begin > MAX_FRAME_BYTES:
                self._break(f"a frame of {end - begin} bytes")
                return
            if len(data) < end:
                needs = end - at
                break
            at = end
            try:
                messages = self._read(data[begin:end])
            except _NO_MESSAGE as exc:
                self._break(f"{type(exc).__name__}: {exc}")
                return
            self._received(self, messages)
        if at < len(data):
            self._in.append(data[at:])
            self._have, self._needs = len(data) - at, needs

    def _read(self, frame: bytes) -> list[Any]:
        items: list[Any] = self._rows.decode(frame)
        return [self._rare.decode(item) if type(item) is bytes else unpack(item) for item in items]

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """The other side is slow: what waits for it lies in memory in any case."""

    def resume_writing(self) -> None:
        return

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        self._lost(self)

    def _break(self, why: str) -> None:
        """The other side does not speak our language: nothing that it says can be trusted."""
        logger.warning("a process of this gateway is not understood, its link is ended: %s", why)
        if self._transport is not None:
            self._transport.abort()
