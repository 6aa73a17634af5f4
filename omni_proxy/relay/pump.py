"""The pump: moves the middle of streams from workers' sockets to clients' without Python (`pump.c`).

A stream that is open towards its client and shows nothing but tokens is handed over to a thread of C; it comes back,
with what was read, as soon as there is anything to decide, and then everything happens as it does without a pump. Where
the extension was not built, or where there is no epoll, there is no pump and all streams stay in Python: that path is
the definition.

Knows no legs and no protocols, only what it needs of them.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import Final, Protocol

try:
    from omni_proxy.relay._pump import Pump as _Pump
except ImportError:  # not Linux, or no compiler when it was installed
    BUILT = False
else:
    BUILT = True


class Worker(Protocol):
    """The connection that a stream is read from."""

    passage: Passage | None

    def bare_fd(self) -> int:
        """The socket, where another may read from it now; -1 where not."""

    def lend(self) -> None:
        """Stop reading from it."""

    def go_on(self, rest: bytes) -> None:
        """Take what was read meanwhile, and read on."""


class Client(Protocol):
    """The connection that a stream goes to."""

    passage: Passage | None

    def bare_fd(self) -> int:
        """The socket, where another may write to it now; -1 where not."""

    def write(self, data: bytes) -> None: ...


class Stream(Protocol):
    """Who answers for a stream."""

    passage: Passage | None
    last_sign: float

    def moved(self, size: int) -> None:
        """So much of it has gone to the client since it was handed over."""


class Passage:
    """One stay of a stream in the pump. It ends before either connection is used or closed by anybody else.

    The stream and both connections know it as long as it lasts.
    """

    __slots__ = ("_client", "_id", "_moves", "_stream", "_worker")

    def __init__(self, moves: _Pump, stream: Stream, worker: Worker, client: Client, src: int, dst: int) -> None:
        self._moves = moves
        self._stream = stream
        self._worker = worker
        self._client = client
        self._id = moves.add(src, dst, stream.last_sign, self._given_back)
        stream.passage = worker.passage = client.passage = self
        worker.lend()

    def last_sign(self) -> float:
        """When the worker has said something last."""
        at = self._moves.last_sign(self._id)
        return self._stream.last_sign if at is None else at

    def end(self) -> bytes:
        """Take the stream out. Returns what was read and has not been looked at.

        That is the beginning of a chunk, or, where the stream was on its way back already, whatever it comes back for.
        """
        found = self._moves.take(self._id)
        if found is None:
            return b""
        unsent, rest, sent, last_sign = found
        self._settle(unsent, sent, last_sign)
        return rest

    def stop(self) -> None:
        """Take the stream out; Python goes on with it."""
        self._worker.go_on(self.end())

    def _given_back(self, unsent: bytes, rest: bytes, sent: int, last_sign: float) -> None:
        self._settle(unsent, sent, last_sign)
        self._worker.go_on(rest)

    def _settle(self, unsent: bytes, sent: int, last_sign: float) -> None:
        stream = self._stream
        stream.passage = self._worker.passage = self._client.passage = None
        stream.last_sign = last_sign
        stream.moved(sent)
        if unsent:
            self._client.write(unsent)


Gaps = tuple[list[tuple[int, int]], int, float]
"""How many gaps of how many milliseconds; how many longer ones, and of how many seconds together."""


class Pump:
    """The pump of one front. It runs beside the front's event loop from when it is made until it is closed."""

    __slots__ = ("_loop", "_moves")

    def __init__(self, loop: AbstractEventLoop, marks: tuple[bytes, ...]) -> None:
        """Raises OSError where there can be no thread."""
        self._loop = loop
        self._moves: Final = _Pump(marks)
        self._moves.start()
        loop.add_reader(self._moves.fileno(), self._moves.collect)

    def __len__(self) -> int:
        """How many streams it moves."""
        return len(self._moves)

    def take_over(self, stream: Stream, worker: Worker, client: Client) -> bool:
        """Move a stream from now on; False: not now, one of the connections is in use."""
        src, dst = worker.bare_fd(), client.bare_fd()
        if src < 0 or dst < 0:
            return False
        try:
            Passage(self._moves, stream, worker, client, src, dst)
        except OSError:  # more than the kernel will watch
            return False
        return True

    def gaps(self) -> Gaps:
        """The time between two reads of a stream, of all streams, since it was asked for last."""
        return self._moves.gaps()

    def close(self) -> None:
        """Move nothing any more. Streams that are in it must have been taken out."""
        self._loop.remove_reader(self._moves.fileno())
        self._moves.close()


def pump_of(loop: AbstractEventLoop, marks: tuple[bytes, ...]) -> Pump | None:
    """A pump, where there can be one."""
    try:
        return Pump(loop, marks) if BUILT else None
    except OSError:
        return None
