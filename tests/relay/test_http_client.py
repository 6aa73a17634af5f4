"""The client towards workers, on its own: every legal answer, however it is cut, and every end of a connection."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.messages import Failure, FailureKind
from omni_proxy.workers.answer import Head
from omni_proxy.workers.http import Ticket, WorkerConnection, WorkerPool

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


class Transport:
    """As much of a transport as a connection uses."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Heard:
    """A handler that keeps what it hears."""

    def __init__(self) -> None:
        self.sent = 0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ended = 0
        self.failure: Failure | None = None

    def on_sent(self) -> None:
        self.sent += 1

    def on_head(self, head: Head) -> None:
        assert self.status == 0
        self.status = head.status
        self.headers = head.headers

    def on_data(self, data: bytes) -> None:
        assert self.status
        assert data
        self.body += data

    def on_end(self) -> None:
        assert self.failure is None
        self.ended += 1

    def on_failure(self, failure: Failure) -> None:
        assert not self.ended
        assert self.failure is None
        self.failure = failure


class Talk:
    """A connection in the hands of a test, with a request sent on it."""

    def __init__(self, reused: bool = False) -> None:
        self.pool = WorkerPool("127.0.0.1", 9)
        self.resent: list[Ticket] = []
        self.connection = WorkerConnection(self.pool)
        self.transport = Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.heard = Heard()
        self.ask(reused)

    def ask(self, reused: bool = False) -> None:
        self.heard = Heard()
        self.ticket = Ticket(self.pool, b"request", self.heard)
        self.ticket.reused = reused
        self.connection.send(self.ticket, self.pool.time())

    def idle(self) -> bool:
        return self.connection in self.pool._idle


ANSWERS: dict[str, tuple[bytes, bytes, bool]] = {
    "length": (OK + b"content-length: 3\r\n\r\nabc", b"abc", True),
    "no body": (OK + b"content-length: 0\r\n\r\n", b"", True),
    "chunks": (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc", True),
    "trailer": (OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n", b"abc", True),
    "close": (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc", b"abc", False),
    "1.0": (OK.replace(b"1.1", b"1.0") + b"content-length: 3\r\n\r\nabc", b"abc", False),
    "continue": (b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK + b"content-length: 3\r\n\r\nabc", b"abc", True),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
}


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=8), whole=st.booleans())
def test_answers_however_they_are_cut(name: str, cuts: list[int], whole: bool) -> None:
    data, body, keeps = ANSWERS[name]
    at = [0, len(data)] if whole else [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    async def main() -> None:
        talk = Talk()
        for _ in range(2 if keeps else 1):
            for a, b in pairwise(at):
                if a != b:
                    talk.connection.data_received(data[a:b])
            heard = talk.heard
            assert (heard.body, heard.ended, heard.failure) == (body, 1, None)
            assert heard.status == (204 if name == "empty" else 200)
            assert (b"x", b"y") not in heard.headers
            assert talk.idle() == keeps
            assert talk.transport.closing != keeps
            if keeps:
                talk.pool._idle.clear()
                talk.ask()

    asyncio.run(main())


async def test_byte_by_byte() -> None:
    for data, body, _ in ANSWERS.values():
        talk = Talk()
        for byte in data:
            talk.connection.data_received(bytes([byte]))
        assert (talk.heard.body, talk.heard.ended) == (body, 1)


async def test_the_end_of_the_connection_is_the_end_of_the_answer_where_nothing_else_is() -> None:
    talk = Talk()
    talk.connection.data_received(OK + b"\r\nabc")
    assert not talk.heard.ended
    talk.connection.connection_lost(None)
    assert (talk.heard.body, talk.heard.ended) == (b"abc", 1)
    talk = Talk()
    talk.connection.data_received(OK + b"\r\nabc")
    talk.connection.connection_lost(ConnectionResetError(104, "reset"))
    assert talk.heard.failure is not None


@pytest.mark.parametrize(
    ("data", "answered"),
    [(b"", False), (b"HTTP/1.1 2", True), (OK + b"content-length: 3\r\n\r\nab", True),
     (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", True), (b"HTTP/1.1 100 Continue\r\n\r\n", True)],
)  # fmt: skip
async def test_a_connection_that_ends_early(data: bytes, answered: bool) -> None:
    talk = Talk()
    if data:
        talk.connection.data_received(data)
    talk.connection.connection_lost(None)
    assert talk.heard.failure == Failure(FailureKind.CLOSED, "connection closed", answered=answered)


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0\r\n", b"\x15\x03\x01\x00", OK + b"content-length: x\r\n\r\n",
     OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
     OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
     OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
)  # fmt: skip
async def test_garbage(data: bytes) -> None:
    talk = Talk()
    talk.connection.data_received(data)
    assert talk.heard.failure is not None
    assert talk.heard.failure.kind is FailureKind.GARBAGE
    assert talk.transport.closing


async def test_what_came_before_garbage_is_kept() -> None:
    talk = Talk()
    talk.connection.data_received(OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n")
    assert talk.heard.body == b"ab"
    assert talk.heard.failure is not None


async def test_an_endless_head_is_garbage() -> None:
    for endless in (b"HTTP/1.1 200 " + b"x" * 1000, OK + b"y: " + b"x" * 1000, OK + b"a: b\r\n" * 1000):
        talk = Talk()
        talk.connection.data_received(endless)
        for _ in range(100):
            if talk.heard.failure is None:
                talk.connection.data_received(b"x" * 1000)
        assert talk.heard.failure is not None
        assert talk.heard.failure.kind is FailureKind.GARBAGE


async def test_more_than_was_asked_for() -> None:
    """A second answer in the same read, or later, never reaches the next request."""
    data = ANSWERS["length"][0]
    talk = Talk()
    talk.connection.data_received(data + data)
    assert (talk.heard.body, talk.heard.ended, talk.idle(), talk.transport.closing) == (b"abc", 1, False, True)
    talk = Talk()
    talk.connection.data_received(data)
    assert talk.idle()
    talk.connection.data_received(data)
    assert (talk.idle(), talk.transport.closing) == (False, True)


async def test_after_an_abort_nothing_is_heard() -> None:
    data = ANSWERS["chunks"][0]
    for at in range(len(data)):
        talk = Talk()
        if at:
            talk.connection.data_received(data[:at])
        body = talk.heard.body
        talk.ticket.abort()
        talk.connection.data_received(data[at:])
        talk.connection.connection_lost(None)
        assert (talk.heard.body, talk.heard.ended, talk.heard.failure) == (body, 0, None)
        assert talk.transport.closing
        assert not talk.idle()


async def test_an_abort_from_within() -> None:
    """The handler itself may end the request at any call."""
    for moment in ("on_head", "on_data"):
        talk = Talk()

        def abort(*_: Any, ticket: Ticket = talk.ticket) -> None:
            ticket.abort()

        setattr(talk.heard, moment, abort)
        talk.connection.data_received(ANSWERS["length"][0])
        assert (talk.heard.ended, talk.heard.failure, talk.transport.closing) == (0, None, True)
        assert not talk.idle()


async def test_pausing() -> None:
    talk = Talk()
    talk.ticket.pause()
    assert not talk.transport.reading
    talk.ticket.resume()
    assert talk.transport.reading
    talk.ticket.pause()
    talk.connection.data_received(ANSWERS["length"][0])
    assert talk.transport.reading, "an idle connection is read from"


async def test_a_pause_before_there_is_a_connection() -> None:
    talk = Talk()
    talk.connection.data_received(ANSWERS["length"][0])
    late = Ticket(talk.pool, b"request", Heard())
    late.pause()
    talk.connection.send(late, talk.pool.time())
    assert not talk.transport.reading


async def test_what_must_not_be_sent_any_more_is_not() -> None:
    """On a connection that waits, on one that takes too long to make, and on another after the first one died."""
    talk = Talk()
    talk.connection.data_received(ANSWERS["length"][0])
    talk.transport.written = b""
    late, in_time = Heard(), Heard()
    talk.pool.request(b"request", late, time.monotonic())
    assert late.failure is not None
    assert (late.failure.kind, late.failure.answered, late.sent) == (FailureKind.LATE, False, 0)
    assert talk.transport.written == b""
    assert talk.idle(), "it has carried nothing"
    talk.pool.request(b"request", in_time, time.monotonic() + 3600.0)
    assert (talk.transport.written, in_time.sent, in_time.failure) == (b"request", 1, None)


async def test_a_connection_that_comes_too_late_is_kept_for_others() -> None:
    came = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        assert await reader.read() == b""
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        pool, heard = WorkerPool("127.0.0.1", server.sockets[0].getsockname()[1]), Heard()
        ticket = pool.request(b"request", heard, time.monotonic())
        async with asyncio.timeout(20):
            await came.wait()
            while heard.failure is None:
                await asyncio.sleep(0.001)
        assert heard.failure.kind is FailureKind.LATE
        assert ticket.done
        assert len(pool._idle) == 1
        pool.close()


async def test_the_request_is_let_go_when_it_is_answered() -> None:
    """Bodies are large and answers take minutes."""
    talk = Talk()
    assert talk.ticket.data
    talk.connection.data_received(OK)
    assert not talk.ticket.data
