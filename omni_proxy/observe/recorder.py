"""The event log: every event that the core heard and what it asked for in answer, for `omni-proxy replay`.

    file  = magic, frame of the header, frames
    frame = length as 4 bytes (big endian), so many bytes of msgpack
    header = [version, core settings]        every other frame = [now, event, effects]

The log begins with the gateway, or a fresh core could not follow it. A gateway never fails because of it: when writing
fails, recording ends with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from omni_proxy.flow.settings import CoreSettings, settings_from
from omni_proxy.messages import Effect, Event, Reconfigured
from omni_proxy.messages.wire import from_wire, to_wire, wire_type

logger = logging.getLogger(__name__)

MAGIC: Final = b"OMNIEV1\n"
VERSION: Final = 2
_BUFFER_BYTES: Final = 64 << 10
_MAX_FRAME_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct(">I")

Frame = tuple[float, Event, list[Effect]]


class BadLog(Exception):
    """A file is no event log, or is damaged; the text says where."""


class Recorder:
    """An observer of the driver that writes what it sees. Raises OSError when the file cannot be opened."""

    def __init__(self, path: str | Path, settings: CoreSettings) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(MAGIC)
        self._file: BinaryIO | None = Path(path).open("wb")  # noqa: SIM115 - kept open on purpose
        self._put((VERSION, settings))
        self.flush()

    def __call__(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Take one step of the core into the log."""
        if self._file is not None:
            self._put((now, to_wire(event), [to_wire(effect) for effect in effects]))
            if len(self._buffer) >= _BUFFER_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self._file is None or not self._buffer:
            return
        try:
            self._file.write(self._buffer)
            self._file.flush()
        except OSError as exc:
            logger.error("recording ends: %s", exc.strerror or exc)
            self._give_up()
        self._buffer.clear()

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._give_up()

    def _give_up(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written cannot be written now either
                self._file.close()
            self._file = None

    def _put(self, frame: object) -> None:
        data = self._encoder.encode(frame)
        self._buffer += _LENGTH.pack(len(data))
        self._buffer += data


class LogReader:
    """Reads an event log from its beginning. Raises BadLog for what is none, OSError where there is no file."""

    def __init__(self, path: str | Path) -> None:
        self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 - `frames` closes it
        self.cut = False
        """The last frame is not whole: whoever wrote it was ended while writing. Known after the last frame."""
        try:
            self.settings = self._header()
        except BadLog:
            self._file.close()
            raise

    def frames(self) -> Iterator[Frame]:
        """Each step in order; closes the file at the end."""
        decoder = msgspec.msgpack.Decoder(tuple[float, wire_type(Event), list[wire_type(Effect)]])  # type: ignore[misc]
        with self._file:
            for number, data in enumerate(self._raw_frames(), 1):
                now, event, effects = self._decoded(decoder, data, f"frame {number}")
                event = from_wire(event)
                if isinstance(event, Reconfigured):
                    self._settings(event.settings, f"frame {number}")
                yield now, event, [from_wire(effect) for effect in effects]

    def _header(self) -> CoreSettings:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise BadLog("is no event log of omni-proxy")
        data = next(self._raw_frames(), None)
        if data is None:
            raise BadLog("ends within its header")
        version, settings = self._decoded(msgspec.msgpack.Decoder(tuple[int, msgspec.Raw]), data, "header")
        if version != VERSION:
            raise BadLog(f"has version {version}; this program reads version {VERSION}")
        return self._settings(self._decoded(msgspec.msgpack.Decoder(dict[str, Any]), settings, "header"), "header")

    def _settings(self, fields: dict[str, Any], place: str) -> CoreSettings:
        try:
            return settings_from(fields)
        except (KeyError, TypeError, ValueError) as exc:
            raise BadLog(f"{place} is damaged: {exc}") from exc

    def _raw_frames(self) -> Iterator[bytes]:
        while head := self._file.read(_LENGTH.size):
            size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            if size > _MAX_FRAME_BYTES:
                raise BadLog(f"is damaged: a frame of {size} bytes")
            data = self._file.read(size)
            if not size or len(data) < size:
                self.cut = True
                return
            yield data

    def _decoded(self, decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw, place: str) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as exc:
            raise BadLog(f"{place} is damaged: {exc}") from exc
