"""The pretending worker over real sockets: both handoff protocols, leases, disconnects, KV events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import uvloop

from omni_proxy.cli import main
from omni_proxy.sim.http.client import ClientFault, Exchange, HttpPool
from omni_proxy.sim.http.server import Connection
from omni_proxy.sim.pretend.block_runs import block_runs
from omni_proxy.sim.pretend.calls import COMPLETIONS
from omni_proxy.sim.pretend.options import PretendOptions
from omni_proxy.sim.pretend.prompts import block_keys, text_of_chat, tokens_of_text, word_token
from omni_proxy.sim.pretend.routes import Routes
from omni_proxy.sim.pretend.worker import Events, PretendWorker
from omni_proxy.workers.connectors.vllm_nixl import ASK_PREFILL
from tests.sim.helpers import SMALL

PROMPT = " ".join(f"w{i}" for i in range(100))


class Served:
    """A worker with its port."""

    def __init__(self, worker: PretendWorker, port: int, pool: HttpPool) -> None:
        self.worker = worker
        self.port = port
        self.pool = pool

    async def post(self, path: str = COMPLETIONS, **fields: Any) -> tuple[int, Any]:
        body = {"prompt": PROMPT, "max_tokens": 3, **fields}
        status, data = await self.pool.fetch("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    async def stream(self, path: str = COMPLETIONS, **fields: Any) -> list[Any]:
        body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, **fields}
        _, data = await self.pool.fetch("POST", path, json.dumps(body).encode())
        events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def metric(self, name: str) -> float:
        _, data = await self.pool.fetch("GET", "/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in data.decode().splitlines() if line.startswith(name))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(events: Events | None = None, **options: Any) -> AsyncIterator[Served]:
    chosen = PretendOptions(**{"model": SMALL, "preset": "small", "block_size": 16, "speed": 100.0, **options})
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    worker = PretendWorker(chosen, ("127.0.0.1", port), events)
    live: set[Connection] = set()
    server = await asyncio.get_running_loop().create_server(partial(Connection, Routes(worker, 1), live), sock=sock)
    pool = HttpPool(f"http://127.0.0.1:{port}")
    try:
        yield Served(worker, port, pool)
    finally:
        server.close()
        await pool.close()
        await worker.close()
        for connection in list(live):
            connection.close()
        await asyncio.sleep(0)


async def test_a_whole_answer_counts_its_tokens_and_its_cache() -> None:
    async with serving() as one:
        for cached in (0, 96):
            status, answer = await one.post()
            assert status == 200
            assert answer["choices"][0]["text"] == " w1 w1 w1"
            assert answer["usage"] == {
                "prompt_tokens": 100,
                "total_tokens": 103,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
        assert await one.metric("vllm:prefix_cache_hits_total") == 96
        assert await one.metric('vllm:request_success_total{engine="0",finished_reason="length"') == 2


async def test_a_prompt_is_told_in_tokens() -> None:
    async with serving() as one:
        assert (await one.post("/v1/completions/render"))[0] == 403
        assert (await one.pool.fetch("POST", "/omni/pretend/scale_out", b'{"enabled":true}'))[0] == 200
        status, (found,) = await one.post("/v1/completions/render")
        assert (status, found["token_ids"], found["model"]) == (200, list(range(100)), "simulated")
        _, chat = await one.post("/v1/chat/completions/render", messages=[{"role": "user", "content": "w3 w4"}])
        assert chat["token_ids"] == [3, 4]
        assert chat["request_id"].startswith("chatcmpl-")
        assert (await one.post("/v1/completions/render", model="other"))[0] == 404
        assert (await one.post("/v1/completions/render", prompt=["a", "b"]))[0] == 400
        assert one.worker.busy() == 0


def test_a_step_ends_by_one_timer_or_two() -> None:
    """uvloop rounds to milliseconds: a timer that fires early must not be set again and again until its instant."""

    async def timers_and_steps() -> tuple[int, int]:
        async with serving(speed=1.0) as one:
            clock, fired = one.worker.clock, 0
            arm = clock._arm

            def counted() -> None:
                nonlocal fired
                fired += 1
                arm()

            clock._arm = counted  # type: ignore[method-assign]
            await one.post(max_tokens=20)
            return fired, one.worker.engine.counters.steps

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        fired, steps = runner.run(timers_and_steps())
    assert fired <= 3 * steps


async def test_a_stream_has_a_chunk_per_token_and_usage_where_asked() -> None:
    async with serving() as one:
        events = await one.stream()
        assert [e["choices"][0]["text"] for e in events] == [" w1"] * 3
        assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, "length"]
        messages = [{"role": "user", "content": "a b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
        events = await one.stream("/v1/chat/completions", messages=messages, stream_options={"include_usage": True})
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [e["choices"][0]["delta"] for e in events[1:-1]] == [{"content": " w1"}] * 3
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["prompt_tokens"] == 3


async def test_a_handoff_in_vllms_protocol() -> None:
    async with serving(role="prefill") as p, serving(role="decode") as d:
        ask = json.loads(ASK_PREFILL)
        status, answer = await p.post(max_tokens=1, kv_transfer_params=ask)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
        params = answer["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["remote_num_tokens"], params["remote_port"]) == (True, 100, p.port)
        assert await p.metric("omni_kv_blocks_leased") == 1
        status, answer = await d.post(kv_transfer_params=params)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert await p.metric("omni_kv_blocks_leased") == 0
        assert p.worker.engine.cache.used_tokens == 0
        assert await d.metric("omni_kv_transfers_total") == 1


async def test_kv_that_is_gone_fails_the_decode_leg() -> None:
    async with serving(role="prefill", kv_lease_s=0.0) as p, serving(role="decode") as d:
        _, answer = await p.post(max_tokens=1, kv_transfer_params=json.loads(ASK_PREFILL))
        await p.until(lambda: p.worker.metrics.leases_expired == 1)
        status, error = await d.post(kv_transfer_params=answer["kv_transfer_params"])
        assert status == 500
        assert "does not hold the KV any more" in error["error"]["message"]
        assert d.worker.engine.cache.used_tokens == 0
        unreachable = {**answer["kv_transfer_params"], "remote_port": 1}
        status, error = await d.post(kv_transfer_params=unreachable)
        assert status == 500
        assert "cannot be reached" in error["error"]["message"]
        assert await d.metric("vllm:nixl_num_failed_transfers_total") == 2


async def test_released_kv_is_free() -> None:
    async with serving(role="prefill") as p:
        _, answer = await p.post(max_tokens=1, kv_transfer_params=json.loads(ASK_PREFILL))
        body = json.dumps({"request_id": answer["kv_transfer_params"]["remote_request_id"]}).encode()
        assert await p.pool.fetch("POST", "/omni/release", body) == (200, b'{"released":true}')
        assert await p.pool.fetch("POST", "/omni/release", body) == (200, b'{"released":false}')
        assert p.worker.engine.cache.used_tokens == 0


@pytest.mark.parametrize("decode_first", [True, False])
async def test_a_handoff_in_sglangs_protocol(decode_first: bool) -> None:
    async with serving(role="prefill") as p, serving(role="decode") as d:
        fields: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": p.port, "bootstrap_room": 2**62}
        legs = [d.post(**fields), p.post(**fields)]
        if decode_first:
            first = asyncio.create_task(legs[0])
            await d.until(lambda: d.worker.busy() == 1)
            prefill, decode = await legs[1], await first
        else:
            prefill, decode = await legs[1], await legs[0]
        assert (prefill[0], decode[0]) == (200, 200)
        assert prefill[1]["kv_transfer_params"] is None
        assert decode[1]["usage"]["completion_tokens"] == 3
        assert p.worker.engine.cache.used_tokens == 0


class _Reader:
    def __init__(self, wanted: int) -> None:
        self.seen = asyncio.Event()
        self._left = wanted

    def on_head(self, status: int) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self._left -= data.count(b"data:")
        if self._left <= 0:
            self.seen.set()

    def on_end(self) -> None:
        raise AssertionError("the stream ended")

    def on_fault(self, fault: str) -> None:
        raise AssertionError(fault)


async def test_a_client_that_leaves_ends_its_work() -> None:
    async with serving(speed=1.0) as one:
        reader = _Reader(2)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "stream": True}).encode()
        exchange: Exchange = one.pool.request("POST", COMPLETIONS, body, reader)
        await reader.seen.wait()
        exchange.abort()
        await one.until(lambda: one.worker.busy() == 0)
        assert await one.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        await asyncio.sleep(0.05)  # the pass under way ends by its timer
        assert one.worker.engine.cache.used_tokens == 0


async def test_draining_refuses_and_stopping_answers() -> None:
    async with serving(speed=0.1) as one:
        waiting = asyncio.create_task(one.post(max_tokens=500))
        await one.until(lambda: one.worker.busy() == 1)
        one.worker.draining = True
        status, _ = await one.pool.fetch("GET", "/health")
        assert status == 503
        assert (await one.post())[0] == 503
        one.worker.stop_all()
        status, error = await waiting
        assert (status, error["error"]["code"]) == (503, 503)


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "x"}, 404, "does not exist"),
        ({"prompt": PROMPT * 20}, 400, "maximum context length is 1024"),
        ({"max_tokens": 1000}, 400, "maximum context length is 1024"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 2}, 400, "n: "),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": 3}, 400, "prompt"),
        ({"bootstrap_room": 1}, 400, "bootstrap_host"),
        ({"bootstrap_port": 0}, 400, "bootstrap_port"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "remote_engine_id"),
        ({"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}}, 400, "cannot both"),
    ],
)
async def test_wrong_bodies_are_refused_with_the_field(fields: dict[str, Any], status: int, said: str) -> None:
    async with serving() as one:
        got, error = await one.post(**fields)
        assert got == status
        assert said in error["error"]["message"]


async def test_other_routes() -> None:
    async with serving(served_model_name=("a", "b")) as one:
        _, models = await one.pool.fetch("GET", "/v1/models")
        assert [(m["id"], m["max_model_len"]) for m in json.loads(models)["data"]] == [("a", 1024), ("b", 1024)]
        assert (await one.pool.fetch("GET", "/health")) == (200, b"")
        assert (await one.pool.fetch("GET", "/load")) == (200, b'{"server_load":0}')
        assert (await one.pool.fetch("GET", "/nothing"))[0] == 404
        assert (await one.pool.fetch("PUT", "/health"))[0] == 405
        assert (await one.pool.fetch("GET", "/omni/room/x"))[0] == 400
        assert await one.metric("vllm:cache_config_info") == 1
        await one.post()
        assert (await one.pool.fetch("POST", "/reset_prefix_cache"))[0] == 200
        assert one.worker.engine.cache.cached_blocks == 0


async def test_several_requests_on_one_connection_and_garbage() -> None:
    async with serving() as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2 + b"rubbish\r\n\r\n")
        data = await reader.read()
        assert data.count(b"HTTP/1.1 200 OK") == 2
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ClientFault, match="cannot connect"):
            await HttpPool("http://127.0.0.1:1").fetch("GET", "/")


def test_words_are_tokens_and_blocks_have_chained_keys() -> None:
    assert list(tokens_of_text("w1 w20\nw3")) == [1, 20, 3]
    assert list(tokens_of_text("w1 w20 x w3"))[:2] == [1, 20]
    assert list(tokens_of_text("")) == []
    assert text_of_chat([{"content": "a"}, {"content": None}, {"content": [{"type": "image"}]}]) == "a image"
    tokens = tokens_of_text(PROMPT)
    keys = block_keys(tokens, 16)
    assert len(keys) == 6
    assert block_keys(tokens[:40], 16) == keys[:2]
    changed = tokens_of_text("w9 " + PROMPT.partition(" ")[2])
    assert not set(block_keys(changed, 16)) & set(keys)
    assert not set(block_keys(tokens, 16, "salt")) & set(keys)


@pytest.mark.parametrize(
    "text",
    ["w1 w2 w30", "w1  w2 ", "w1 w2\nw3", " w1", "w", "ww1", "w 5", "w1 w", "w1w2", "w1 5", "w99999999 w1",
     "w999999999", "w000000001 w2", "w\u0661 w2", "w1 \ud800", "", "w1_0", "w+1"],
)  # fmt: skip
def test_the_fast_way_to_tokens_is_the_slow_one(text: str) -> None:
    assert list(tokens_of_text(text)) == [word_token(word) for word in text.split()]


def test_neighbouring_blocks_make_runs() -> None:
    keys = (10, 11, 12, 13, 14)
    assert block_runs(keys, [10, 11, 13]) == [(0, 2), (3, 4)]
    assert block_runs(keys, [12]) == [(2, 3)]
    assert block_runs(keys, list(keys)) == [(0, 5)]


async def test_kv_events_reach_a_subscriber() -> None:
    pytest.importorskip("zmq")
    from omni_proxy.sim.pretend.kv_events import KvEvents

    events = KvEvents("127.0.0.1", 0, 16)
    try:
        (source,) = events.sources()
        with pytest.raises(OSError, match="cannot publish KV events"):
            KvEvents("127.0.0.1", int(source["endpoint"].rpartition(":")[2]), 16)
        events.stored([1, 2], None, tokens_of_text(PROMPT)[:32])
        events.removed([2])
        batches = [msgspec.msgpack.decode(batch) for batch in await _replayed(source["replay_endpoint"])]
    finally:
        events.close()
    stored, removed = (batch[1][0] for batch in batches)
    assert (stored["type"], stored["block_hashes"], stored["parent_block_hash"]) == ("BlockStored", [1, 2], None)
    assert (stored["token_ids"], stored["block_size"]) == (list(range(32)), 16)
    assert (removed["type"], removed["block_hashes"]) == ("BlockRemoved", [2])


async def _replayed(endpoint: str) -> list[bytes]:
    """Everything that was published."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    try:
        asker = context.socket(zmq.DEALER)
        asker.connect(endpoint)
        batches: list[bytes] = []
        while True:
            if not batches:
                await asker.send_multipart([b"", (0).to_bytes(8, "big")])
            _, _, number, batch = await asker.recv_multipart()
            if number == b"\xff" * 8:
                if len(batches) == 2:
                    return batches
                batches.clear()  # the publisher's thread had not yet taken all in
            else:
                batches.append(batch)
    finally:
        context.destroy(linger=0)


class _Told:
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def stored(self, keys: Sequence[int], parent: int | None, tokens: Sequence[int]) -> None:
        assert len(tokens) == 16 * len(keys)
        self.told.append(("stored", len(keys), -1 if parent is None else 1))

    def removed(self, keys: Sequence[int]) -> None:
        self.told.append(("removed", len(keys), 0))

    def cleared(self) -> None:
        self.told.append(("cleared", 0, 0))

    def sources(self) -> list[dict[str, Any]]:
        return [{"publisher": "none"}]


async def test_a_worker_tells_its_blocks() -> None:
    told = _Told()
    async with serving(events=told) as one:
        await one.post()
        await one.post(prompt=PROMPT + " " + PROMPT)
        assert await one.pool.fetch("GET", "/kv_event_sources") == (200, b'[{"publisher":"none"}]')
        await one.pool.fetch("POST", "/reset_prefix_cache")
    # 100 tokens in passes of 64 and 36, then what the longer prompt adds behind the 96 that are cached
    assert told.told[:2] == [("stored", 4, -1), ("stored", 2, 1)]
    assert sum(count for what, count, _ in told.told if what == "stored") == 12
    assert told.told[-2:] == [("removed", 12, 0), ("cleared", 0, 0)]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--simulate", "nothing"], "no preset 'nothing'"),
        (["--simulate", "demo", "--speed", "0"], "must be a number above 0, got '0'"),
        (["--simulate", "demo", "--engine", "absent.yaml"], "absent.yaml: No such file"),
        (["--simulate", "demo", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:0"),
    ],
)
def test_faults_at_the_start_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["worker", *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    shown = capsys.readouterr().err
    assert code == 2
    assert fault in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.e2e
def test_the_process_says_when_it_serves_and_ends_by_a_signal() -> None:
    command = [sys.executable, "-m", "omni_proxy", "worker", "--simulate", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("pretending to be demo (mixed) on 127.0.0.1:")
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_it_needs_neither_torch_nor_zmq() -> None:
    code = (
        "import sys; import omni_proxy.sim.pretend.command; "
        "print([m for m in ('torch', 'zmq', 'numpy', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
