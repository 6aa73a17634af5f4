"""The pump's thread beside Python: whatever is taken out and handed over again meanwhile, every byte arrives once."""

from __future__ import annotations

import random
import select
import socket
import threading
import time

import pytest

from omni_proxy.relay.pump import BUILT
from tests.relay.scripted import DONE, event

if not BUILT:
    pytest.skip("the pump is not built here", allow_module_level=True)

from omni_proxy.api.sse import MARKS
from omni_proxy.relay import _pump
from tests.relay.pumped import chunk

END = chunk(DONE) + b"0\r\n\r\n"


class Stream:
    """A worker that says all that it has, in pieces of any size, and a client that compares it."""

    def __init__(self, pump: _pump.Pump, seed: int, count: int) -> None:
        self._pump = pump
        self._random = random.Random(seed)
        self.worker, self.src = socket.socketpair()
        self.dst, self.client = socket.socketpair()
        self.said = b"".join(chunk(event(f"{seed}-{number}" * (number % 7))) for number in range(count)) + END
        self.got = b""
        self.id: int | None = None
        self.backs = 0
        self._begun = b""

    def say_all(self) -> None:
        """The worker's thread."""
        at = 0
        while at < len(self.said):
            size = self._random.choice((1, 7, 100, 1500, 20_000))
            self.worker.sendall(self.said[at : at + size])
            at += size

    def enter(self) -> None:
        self.id = self._pump.add(self.src.fileno(), self.dst.fileno(), 0.0, self._back)

    def leave(self) -> None:
        """Take it out, as whoever closes or pauses does, and go on by hand."""
        if self.id is None or (found := self._pump.take(self.id)) is None:
            return
        self.id = None
        self._go_on(found[0], found[1])

    def _back(self, unsent: bytes, rest: bytes, _sent: int, _last_sign: float) -> None:
        self.id = None
        self.backs += 1
        self._go_on(unsent, rest)

    def _go_on(self, unsent: bytes, rest: bytes) -> None:
        """Pass on what was begun until a chunk ends, as Python does, and hand it over again."""
        self.dst.sendall(unsent)
        while rest and not rest.endswith((b"\n\n\r\n", b"\r\n\r\n")):
            rest += self.src.recv(1)
        self.dst.sendall(rest)
        if not rest.endswith(b"0\r\n\r\n"):
            self.enter()

    def close(self) -> None:
        for sock in (self.worker, self.src, self.dst, self.client):
            sock.close()


def _read(streams: list[Stream]) -> None:
    """The clients' thread."""
    left = {stream.client: stream for stream in streams}
    while left:
        ready, _, _ = select.select(list(left), [], [], 30)
        assert ready, "nothing came for half a minute"
        for client in ready:
            stream = left[client]
            stream.got += client.recv(1 << 16)
            if len(stream.got) >= len(stream.said):
                del left[client]


@pytest.mark.parametrize("seed", range(3))
def test_streams_come_and_go_while_the_thread_moves_them(seed: int) -> None:
    pump = _pump.Pump(MARKS)
    pump.start()
    chance = random.Random(seed)
    streams = [Stream(pump, number, 3000) for number in range(12)]
    for stream in streams:
        stream.enter()
    threads = [threading.Thread(target=stream.say_all) for stream in streams]
    reader = threading.Thread(target=_read, args=(streams,))
    for thread in (*threads, reader):
        thread.start()
    while reader.is_alive():
        chance.choice(streams).leave()
        if select.select([pump.fileno()], [], [], 0.001)[0]:
            pump.collect()
    for thread in (*threads, reader):
        thread.join()
    assert [stream.got == stream.said for stream in streams] == [True] * len(streams)
    assert [stream.id for stream in streams] == [None] * len(streams)
    assert all(stream.backs for stream in streams), "the end of each comes back"
    counts, longer, _ = pump.gaps()
    assert longer + sum(count for _, count in counts) > 0
    assert len(pump) == 0
    pump.close()
    for stream in streams:
        stream.close()


def test_who_moves_by_itself_is_not_moved_by_hand() -> None:
    pump = _pump.Pump(MARKS)
    pump.start()
    pump.start()
    with pytest.raises(ValueError, match="runs by itself"):
        pump.turn(0.0)
    pump.close()
    with pytest.raises(ValueError, match="closed"):
        pump.start()


def test_a_pump_is_closed_with_streams_that_move_and_that_come_back() -> None:
    pump = _pump.Pump(MARKS)
    pump.start()
    pairs = [socket.socketpair() for _ in range(3)]
    for _, src in pairs[:2]:
        pump.add(src.fileno(), pairs[2][0].fileno(), 0.0, print)
    pairs[0][0].sendall(b"x")
    assert select.select([pump.fileno()], [], [], 20)[0]
    pump.close()
    assert (len(pump), pump.fileno()) == (0, -1)
    for sock in (s for pair in pairs for s in pair):
        sock.close()


def test_the_thread_waits_without_work() -> None:
    pump = _pump.Pump(MARKS)
    pump.start()
    worked, since = time.process_time(), time.monotonic()
    time.sleep(0.3)
    assert time.process_time() - worked < 0.5 * (time.monotonic() - since)
    pump.close()
