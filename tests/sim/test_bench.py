"""The load client: its reader of streams, its prompts, and whole runs against good and bad servers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.sim.bench.client import BenchClient, BenchPlan
from omni_proxy.sim.bench.measure import Seen, bench_figures, faults, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.bench.stream import StreamReader
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.http.client import HttpPool
from omni_proxy.sim.http.server import Connection, Incoming, chunked
from omni_proxy.sim.pretend.prompts import tokens_of_text
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import SimRequest, Workload
from tests.sim.test_pretend import serving

CHAT_STREAM = (
    b': comment\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":null}\n\n'
    b'data:{"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\r\n\r\n'
    b'data: {"choices": [{"delta": {"content": "c"}, "finish_reason": null}], "usage": null}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    b"data: [DONE]\n\n"
)


def read(data: bytes, size: int) -> StreamReader:
    """Feed pieces of `size` bytes; the instant is the number of bytes so far."""
    reader = StreamReader()
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        reader.feed(piece, float(at + len(piece)))
    return reader


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_stream_in_any_pieces(size: int) -> None:
    reader = read(CHAT_STREAM, size)
    assert (reader.chunks, reader.completion_tokens, reader.cached_tokens) == (3, 7, 5)
    assert (reader.done, reader.error) == (True, None)


def test_roles_and_ends_are_no_tokens() -> None:
    reader = read(CHAT_STREAM, 1)
    assert reader.first_at == CHAT_STREAM.index(b'"a"') + len(b'"a"},"finish_reason":null}],"usage":null}\n')
    assert reader.last_at == CHAT_STREAM.index(b'"c"') + len(b'"c"}, "finish_reason": null}], "usage": null}\n')


def test_an_error_within_a_stream() -> None:
    assert read(b'data: {"error":{"message":"out of memory","code":500}}\n\n', 5).error is not None
    assert read(b"data: rubbish\n\n", 5).error is not None
    assert read(b'data: {"choices":[{"text":"a"}],"error":null}\n\n', 5).error is None


def test_the_same_block_is_the_same_text() -> None:
    first, second = (SimRequest(0, 70, 1, (5, 6)), SimRequest(0, 100, 1, (5, 7)))
    texts = [Prompts(PromptForm.WORDS, 64).body(r, n, chat=False)["prompt"] for n, r in enumerate((first, second))]
    tokens = [list(tokens_of_text(text)) for text in texts]
    assert [len(t) for t in tokens] == [70, 100]
    assert tokens[0][:64] == tokens[1][:64]
    assert tokens[0][64:] != tokens[1][64:70]
    ids = Prompts(PromptForm.IDS, 64, 1000).body(second, 0, chat=False)["prompt"]
    assert len(ids) == 100
    assert all(10 <= token < 1000 for token in ids)


def test_prompts_without_keys_share_nothing() -> None:
    prompts = Prompts(PromptForm.WORDS, 64)
    one, two = (prompts.body(SimRequest(0, 64, 1), n, chat=True)["messages"][0]["content"] for n in range(2))
    assert one != two


def plan(**more: object) -> BenchPlan:
    fields = {"model": "simulated", "chat": False, "stream": True, "concurrency": None, "timeout_s": 30.0, **more}
    return BenchPlan(**fields)  # type: ignore[arg-type]


async def run(port: int, workload: Workload, chosen: BenchPlan) -> list[Seen]:
    pool = HttpPool(f"http://127.0.0.1:{port}")
    try:
        return await BenchClient(pool, workload, Prompts(PromptForm.WORDS, workload.block_tokens), chosen).run()
    finally:
        await pool.close()


SMALL_LOAD = "turns,requests=30,rate=200,prompt=30,prefix=64,output=5,think=0.01"


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
async def test_a_run_against_a_pretending_worker(concurrency: int | None, stream: bool, chat: bool) -> None:
    workload = parse_synthetic(SMALL_LOAD, 1)
    async with serving(speed=1000.0) as one:
        seen = await run(one.port, workload, plan(concurrency=concurrency, stream=stream, chat=chat))
    assert [s.outcome for s in seen] == ["completed"] * 30
    assert [s.number for s in seen] == list(range(30))
    assert [s.completion_tokens for s in seen] == [r.output_tokens for r in workload.requests]
    assert sum(s.cached_tokens or 0 for s in seen) > 0
    for one_seen, request in zip(seen, workload.requests, strict=True):
        if request.after is not None:
            assert one_seen.due >= seen[request.after].ended
        assert one_seen.first is not None
        assert one_seen.last is not None
        assert one_seen.due <= one_seen.first <= one_seen.last <= one_seen.ended + 1e-6


async def test_at_most_so_many_at_a_time() -> None:
    workload = Workload("w", 64, tuple(SimRequest(0.0, 20, 4) for _ in range(12)))
    async with serving(speed=50.0) as one:
        seen = await run(one.port, workload, plan(concurrency=2))
    for one_seen in seen:
        others = [s for s in seen if s.sent <= one_seen.sent < s.ended and s is not one_seen]
        assert len(others) <= 2  # the one beside it, and one that ends in this very instant


@asynccontextmanager
async def bad_server(answer: Callable[[Incoming], None]) -> AsyncIterator[int]:
    sock = socket.create_server(("127.0.0.1", 0))
    live: set[Connection] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answer, live), sock=sock)
    try:
        yield sock.getsockname()[1]
    finally:
        server.close()
        for connection in list(live):
            connection.close()
        await asyncio.sleep(0)


def _refuse(status: int) -> Callable[[Incoming], None]:
    return lambda incoming: incoming.reply.send(status, b'{"error":{"message":"no"}}')


def _break_off(incoming: Incoming) -> None:
    incoming.reply.begin_stream()
    incoming.reply.write(chunked(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'))
    incoming.reply.end_stream()


def _fail_within(incoming: Incoming) -> None:
    incoming.reply.begin_stream()
    incoming.reply.end_stream(chunked(b'data: {"error":{"message":"broken"}}\n\ndata: [DONE]\n\n'))


def _say_nothing(incoming: Incoming) -> None:
    incoming.reply.begin_stream()
    incoming.reply.end_stream(chunked(b"data: [DONE]\n\n"))


@pytest.mark.parametrize(
    ("answer", "outcome", "status"),
    [
        (_refuse(429), "rejected", 429),
        (_refuse(503), "rejected", 503),
        (_refuse(500), "error", 500),
        (_refuse(404), "error", 404),
        (_break_off, "cut", 200),
        (_fail_within, "error", 200),
        (_say_nothing, "error", 200),
        (lambda incoming: None, "timeout", 0),
    ],
)
async def test_what_is_no_answer_is_not_counted_as_one(
    answer: Callable[[Incoming], None], outcome: str, status: int
) -> None:
    workload = Workload("w", 64, (SimRequest(0.0, 10, 2),))
    async with bad_server(answer) as port:
        (seen,) = await run(port, workload, plan(timeout_s=0.2))
    assert (seen.outcome, seen.status) == (outcome, status)
    assert seen.latency() is None
    assert faults([seen])[0].startswith(f"1 x {outcome}")


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    (seen,) = await run(port, Workload("w", 64, (SimRequest(0.0, 10, 2),)), plan())
    assert (seen.outcome, seen.status) == ("error", 0)
    assert "cannot connect" in seen.detail


async def test_a_kept_connection_that_died_is_replaced() -> None:
    """The server ends its connection after each answer, without having said so."""
    served: list[Incoming] = []

    def answer(incoming: Incoming) -> None:
        served.append(incoming)
        connection = incoming.reply._connection
        assert connection is not None
        incoming.reply.send(200, b'{"choices":[{"text":"a"}]}')
        connection.close()

    workload = Workload("w", 64, tuple(SimRequest(0.0, 10, 2) for _ in range(5)))
    async with bad_server(answer) as port:
        seen = await run(port, workload, plan(stream=False, concurrency=1))
    assert [s.outcome for s in seen] == ["completed"] * 5


def test_figures_of_a_run() -> None:
    base = Seen(0, 1.0, 1.1, 3.0, 200, "completed", prompt_tokens=100, first=1.5, last=2.5, completion_tokens=11)
    bad = Seen(1, 1.0, 1.0, 2.0, 429, "rejected", prompt_tokens=50)
    found = bench_figures([base, bad], Slo(ttft=0.6, tpot=0.2))
    assert found.outcomes == {"completed": 1, "rejected": 1}
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.ttft.mean == 0.5
    assert found.tpot.mean == pytest.approx(0.1)
    assert (found.attained, found.goodput) == (0.5, 0.5)
    slow = uncompressed(base, 4.0)
    assert (slow.due, slow.first, slow.ended) == (4.0, 6.0, 12.0)


@pytest.mark.slow
def test_the_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "omni_proxy", "worker", "--simulate", "demo", "--speed", "100"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = "http://" + process.stderr.readline().split()[-1]
        saved = tmp_path / "r.json"
        code = main(["bench", "--url", url, "--synthetic", SMALL_LOAD, "--speed", "100", "--json", str(saved)])
        process.terminate()
        process.wait(20)
    assert code == 0
    assert "30 completed" in capsys.readouterr().out
    assert len(json.loads(saved.read_bytes())["requests"]) == 30


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--url", "nothing", "--synthetic", "poisson"], "--url: 'nothing' must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1", "--synthetic", "poisson"], "cannot connect"),
        (["--url", "http://127.0.0.1:1"], "give either --trace or --synthetic"),
        (["--url", "http://127.0.0.1:1", "--synthetic", "poisson,requests=1", "--rate", "3"], "no rate to scale"),
        (["--synthetic", "poisson"], "--url"),
        (
            ["--url", "http://127.0.0.1:1", "--synthetic", "poisson", "--model", "m", "--header", "x"],
            "must be NAME: VALUE",
        ),
        (
            ["--url", "http://127.0.0.1:1", "--synthetic", "poisson", "--model", "m", "--header", "a: b\r\nc: d"],
            "must be NAME: VALUE",
        ),
    ],
)
def test_faults_of_the_command_are_one_line(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    shown = capsys.readouterr().err
    assert code == 2
    assert fault in shown
    assert len(shown.splitlines()) == 1
