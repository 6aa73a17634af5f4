"""A stream between two socket pairs, moved by the pump alone; what comes back is read as the relay reads it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from omni_proxy.api.sse import MARKS, StreamScan
from omni_proxy.relay import _pump
from omni_proxy.workers.answer import AnswerReader
from tests.relay.scripted import event

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = event("first")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Reads:
    """What reads a stream in Python: as a leg does, once the first token has been seen."""

    def __init__(self) -> None:
        self.reader = AnswerReader()
        self.scan = StreamScan(strip_usage=True, cached_tokens=3)
        self.gaps = -1
        """Reads with a part of the body in them, after the first."""
        self.sent = 0
        self.feed(HEAD + chunk(FIRST))

    def feed(self, data: bytes) -> bytes:
        """Take one read; what the client gets now."""
        bodies: list[bytes] = []
        self.reader.feed(data, bodies)
        shown = self.scan.feed(b"".join(bodies)) if bodies else b""
        self.gaps += bool(bodies)
        self.sent += len(shown)
        return shown

    def told(self) -> tuple[object, ...]:
        scan = self.scan
        return scan.usage, scan.done, scan.failed, scan.broke, scan.mid_event, self.reader.complete, self.reader.excess

    @property
    def plain(self) -> bool:
        return self.reader.between_chunks and self.scan.only_tokens


class Line(Reads):
    """The same with the pump in between: the worker writes, the client reads."""

    def __init__(self, client_buffer: int | None = None) -> None:
        self.now = 100.0
        self.lengths: list[float] = []
        self.pump = _pump.Pump(MARKS)
        self.worker, self.src = socket.socketpair()
        self.dst, self.client = socket.socketpair()
        if client_buffer is not None:
            self.dst.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, client_buffer)
        self.client.setblocking(False)
        self.backs: list[tuple[bytes, bytes, int, float]] = []
        self.unsent = b""
        """What a transport would hold: the client has not taken it."""
        self.stream: int | None = None
        super().__init__()
        self.got = chunk(FIRST)
        self.enter()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.pump.close()
        for sock in (self.worker, self.src, self.dst, self.client):
            sock.close()

    @property
    def moved(self) -> bool:
        """Is it in the pump?"""
        return self.stream is not None

    def enter(self) -> None:
        """Hand it over, if it may be."""
        if self.plain and self.stream is None and not self.unsent:
            self.stream = self.pump.add(self.src.fileno(), self.dst.fileno(), self.now, self._back)

    def say(self, data: bytes) -> None:
        """The worker writes once, and it is read once."""
        self.worker.sendall(data)
        self.now += 1.0
        if self.moved:
            self.serve()
        else:
            self._go_on(self.src.recv(1 << 20))
        self.read()

    def serve(self) -> None:
        """One turn of the pump, and what comes of it."""
        self.pump.turn(self.now)
        counts, longer, longer_s = self.pump.gaps()
        self.lengths += [ms / 1000.0 for ms, count in counts for _ in range(count)]
        self.lengths += [longer_s] * longer  # one read makes one gap
        self.pump.collect()

    def read(self) -> None:
        """The client reads what there is."""
        try:
            while data := self.client.recv(1 << 20):
                self.got += data
        except BlockingIOError:
            return

    def take(self) -> bytes:
        """Take it out of the pump; what was begun."""
        assert self.stream is not None
        found = self.pump.take(self.stream)
        assert found is not None
        self.stream = None
        unsent, rest, sent, _ = found
        self.sent += sent
        self.unsent += unsent
        return rest

    def body(self) -> bytes:
        """The chunks that the client got, put together."""
        data = self.got + self.unsent
        body = b""
        while data:
            size, end, data = data.partition(b"\r\n")
            length = int(size, 16)
            assert (end, data[length : length + 2]) == (b"\r\n", b"\r\n")
            body, data = body + data[:length], data[length + 2 :]
        return body

    def _back(self, unsent: bytes, rest: bytes, sent: int, last_sign: float) -> None:
        self.backs.append((unsent, rest, sent, last_sign))
        self.stream = None
        self.sent += sent
        self.unsent += unsent
        if rest:
            self._go_on(rest)

    def _go_on(self, data: bytes) -> None:
        shown = self.feed(data)
        if shown:
            self.unsent += chunk(shown)
        try:
            self.unsent = self.unsent[self.dst.send(self.unsent, socket.MSG_DONTWAIT) :] if self.unsent else b""
        except BlockingIOError:
            return
        self.enter()


def definition(parts: Sequence[bytes]) -> tuple[Reads, bytes]:
    """What becomes of a stream without a pump."""
    reads, body = Reads(), FIRST
    for part in parts:
        body += reads.feed(part)
    return reads, body
