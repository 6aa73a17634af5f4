"""`/health` of one worker: what it may answer, and how long that may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from omni_proxy.tls import ClientFiles
from omni_proxy.workers.health import HealthCheck

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Worker:
    """Answers each question on a connection with the next of these bytes; None closes it."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
        writer.close()


@contextlib.asynccontextmanager
async def asking(worker: Serve, api_key: str | None = None) -> AsyncIterator[tuple[HealthCheck, asyncio.Server]]:
    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    check = HealthCheck(f"http://127.0.0.1:{port}", api_key, None)
    try:
        yield check, server
    finally:
        check.close()
        server.close()
        await asyncio.sleep(0.02)  # its connections hear of it


def answer(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


async def test_one_connection_is_asked_again_and_again() -> None:
    worker = Worker(answer(200, b"ok"), answer(503), answer(200))
    async with asking(worker, "key") as (check, _):
        assert await check.fault(5.0) is None
        assert await check.fault(5.0) == "/health says 503"
        assert await check.fault(5.0) is None
    assert worker.connections == 1
    assert worker.asked[0].startswith(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"authorization: Bearer key\r\n" in worker.asked[0]


async def test_a_server_without_that_route_is_asked_for_its_models() -> None:
    worker = Worker(answer(404), answer(200, b"{}"), answer(404), answer(500), answer(404), answer(404), answer(200))
    async with asking(worker) as (check, _):
        assert await check.fault(5.0) is None
        assert await check.fault(5.0) == "/v1/models says 500"
        assert await check.fault(5.0) == "/v1/models says 404"
        assert await check.fault(5.0) is None
    assert worker.connections == 1
    assert [line.split(b" ")[1] for line in worker.asked[:2]] == [b"/health", b"/v1/models"]


async def test_a_connection_that_was_closed_is_opened_again() -> None:
    worker = Worker(answer(200), None, answer(200))
    async with asking(worker) as (check, _):
        assert await check.fault(5.0) is None
        assert await check.fault(5.0) is None
        check.close()
        worker.answers.append(answer(200))
        assert await check.fault(5.0) is None
    assert worker.connections == 3


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (None, "cannot be reached (connection closed)"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 5\r\n\r\nab", "no answer to /health in time"),
        (b"", "no answer to /health in time"),
        (b"SSH-2.0\r\n\r\n", "cannot be reached (not HTTP/1.1"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", "/health says 500"),
    ],
)
async def test_what_is_no_good_answer(sent: bytes | None, fault: str) -> None:
    async with asking(Worker(sent, sent)) as (check, _):
        assert (await check.fault(0.3) or "").startswith(fault)


async def test_nobody_there() -> None:
    async with asking(Worker()) as (check, server):
        server.close()
        await server.wait_closed()
        assert "onnect" in (await check.fault(1.0) or "")


async def test_files_that_cannot_be_loaded_are_named() -> None:
    check = HealthCheck("https://127.0.0.1:1", None, ClientFiles("/nowhere/ca.pem", None, None, True, None))
    assert "/nowhere/ca.pem" in (await check.fault(1.0) or "")
