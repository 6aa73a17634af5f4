"""A client that leaves ends the engine's work, and KV that it never heard of is released; over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from omni_proxy.workers.engine.generation import Generation, Inbox
from tests.workers.server.fake import FakeEngine, LiveServer


def wait_until(holds: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def open_call(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    sock.sendall(head + data)
    return sock


def reset(sock: socket.socket) -> None:
    """Close with RST, as a client that was killed does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


ENDINGS = [pytest.param(socket.socket.close, id="fin"), pytest.param(reset, id="rst")]
CALLS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": ["hello", "world"], "n": 2}),
]


@pytest.mark.parametrize("leave", ENDINGS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_leaving_before_the_first_token_ends_the_request(
    live: LiveServer, engine: FakeEngine, path: str, body: dict[str, Any], stream: bool, leave: Callable[[Any], None]
) -> None:
    engine.gate.clear()
    sock = open_call(live.port, path, {**body, "stream": stream})
    wait_until(lambda: engine.stats().running > 0)
    leave(sock)
    wait_until(lambda: engine.stats().running == 0)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)


@pytest.mark.parametrize("leave", ENDINGS)
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_leaving_in_the_middle_of_a_stream_ends_the_request(
    live: LiveServer, engine: FakeEngine, path: str, body: dict[str, Any], leave: Callable[[Any], None]
) -> None:
    engine.hold_at = 5
    sock = open_call(live.port, path, {**body, "stream": True, "ignore_eos": True})
    assert b"200 OK" in sock.recv(4096)
    leave(sock)
    wait_until(lambda: engine.stats().running == 0)
    assert engine.aborted


def test_kv_that_the_client_never_heard_of_is_released(live: LiveServer, engine: FakeEngine) -> None:
    engine.gate.clear()
    body = {"prompt": "hello", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    sock = open_call(live.port, "/v1/completions", body)
    wait_until(lambda: engine.stats().running > 0)
    live.call(lambda: None)
    request = engine.submitted[0]
    # The engine has finished, the client has left, and neither knows of the other yet.
    emit = engine.take_over(request.request_id)
    sock.close()
    wait_until(lambda: engine.aborted != [])
    engine.finish(request, emit)
    wait_until(lambda: engine.released == [request.request_id])


async def test_outputs_that_nobody_read_are_released_at_the_end(engine: FakeEngine, live: LiveServer) -> None:
    generation = Generation(engine, Inbox(asyncio.get_running_loop()))
    call = await live.builder.completion(prefill_body(), "r", 0)
    generation.start(call.choices)
    await asyncio.to_thread(wait_until, lambda: engine.stats().running == 0)
    await asyncio.sleep(0)  # let the inbox deliver
    generation.client_gone()
    generation.close()
    assert engine.released == [call.choices[0].request.request_id]


def prefill_body() -> Any:
    from omni_proxy.workers.engine.openai_api import CompletionRequest

    return CompletionRequest(prompt="hello", max_tokens=1, kv_transfer_params={"do_remote_decode": True})


def test_many_leaving_clients_leave_nothing_behind(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    body = {"prompt": "hello", "stream": True, "ignore_eos": True}
    for round_ in range(30):
        sock = open_call(live.port, "/v1/completions", body)
        if round_ % 2:
            sock.recv(100)
        reset(sock)
    wait_until(lambda: engine.stats().running == 0)
    wait_until(lambda: http.get("/load").json() == {"server_load": 0})


def test_a_slow_reader_loses_nothing(live: LiveServer, engine: FakeEngine) -> None:
    engine.script = lambda request: [5] * 100
    body = {"prompt": "hello", "stream": True, "ignore_eos": True, "max_tokens": 100}
    with open_call(live.port, "/v1/completions", body) as sock:
        data = b""
        while b"[DONE]" not in data:
            data += sock.recv(64)
    text = live.tokenizer.token_text(5)
    assert sum(line.count(b'"text":"' + text.encode()) for line in data.split(b"\n")) == data.count(b'"text"')


def test_a_draining_worker_refuses_new_work_and_ends_the_old(own_server: LiveServer) -> None:
    engine = own_server.engine
    assert isinstance(engine, FakeEngine)
    engine.hold_at = 5
    with httpx.Client(base_url=own_server.url, timeout=5, trust_env=False) as http:
        body = {"prompt": "hello", "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            own_server.call(own_server.server.drain)
            response = http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, 503)
            assert http.get("/health").status_code == 503
            own_server.call(own_server.server.stop_all)
            *_, last = [line for line in lines if line]
    assert "shutting down" in last
    wait_until(lambda: engine.stats().running == 0)


def test_a_dead_engine_is_not_healthy(own_server: LiveServer) -> None:
    assert httpx.get(own_server.url + "/health", trust_env=False).status_code == 200
    assert isinstance(own_server.engine, FakeEngine)
    own_server.engine.stop()
    response = httpx.get(own_server.url + "/health", trust_env=False)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "ServiceUnavailableError")
