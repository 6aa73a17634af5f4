"""Spans at a collector on a real socket, context at the workers, and nothing of both where tracing is off."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from omni_proxy.config import ConfigError, parse
from tests.relay.conftest import Start, config_of, running
from tests.relay.scripted import ScriptedWorker, decode_stream, prefill_ok

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}


class Collector:
    """Takes OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.add(self.path)
                collector.keys.add(self.headers.get("x-key"))
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.bodies.append(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def spans(self) -> list[Any]:
        proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for body in self.bodies:
            request = proto.ExportTraceServiceRequest.FromString(body)
            found += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return found

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
    collector = Collector()
    yield collector
    collector.close()


async def serve_one(config: dict[str, Any], headers: dict[str, str]) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A gateway from start to end, one streamed request through it."""
    p0, d0 = ScriptedWorker(prefill_ok), ScriptedWorker(decode_stream)
    await p0.start()
    await d0.start()
    try:
        async with running(config_of({"p0": p0, "d0": d0}, config), {"p0": p0, "d0": d0}) as rig:
            await rig.up()
            body = {**CHAT, "stream": True}
            answer = await rig.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            await rig.idle()
    finally:
        await p0.stop()
        await d0.stop()
    return p0, d0


async def test_a_request_is_a_span_with_its_stages_below(collector: Collector) -> None:
    tracing = {"endpoint": collector.url, "headers": {"x-key": "k"}, "service_name": "gw"}
    p0, d0 = await serve_one({"tracing": tracing}, {"traceparent": SAMPLED, "tracestate": "a=1", "x-request-id": "r7"})
    assert (collector.paths, collector.keys) == ({"/v1/traces"}, {"k"})
    spans = {span.name: span for span in collector.spans()}
    root = spans["POST /v1/chat/completions"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    below = {name: span for name, span in spans.items() if span is not root}
    assert {span.parent_span_id for span in below.values()} == {root.span_id}
    assert {"received", "prefill_waiting", "prefill_running", "decode_running"} <= set(below)
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in below.values())
    assert [event.name for event in root.events] == ["first token"]
    told = {a.key: a.value.string_value or a.value.int_value for a in root.attributes}
    names = ("omni.request_id", "omni.outcome", "http.response.status_code")
    assert [told[name] for name in names] == ["r7", "completed", 200]
    worker = {a.key: a.value.string_value for a in below["prefill_running"].attributes}
    assert worker["omni.worker"] == "p0"
    assert not any(b"a secret" in body for body in collector.bodies)
    for each in (p0, d0):
        assert each.seen[0].headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
        assert each.seen[0].headers["tracestate"] == "a=1"


async def test_who_brings_no_trace_begins_one(collector: Collector) -> None:
    p0, _ = await serve_one({"tracing": {"endpoint": collector.url}}, {})
    roots = [span for span in collector.spans() if not span.parent_span_id]
    assert len(roots) == 1
    assert p0.seen[0].headers["traceparent"] == f"00-{roots[0].trace_id.hex()}-{roots[0].span_id.hex()}-01"


async def test_a_trace_that_is_not_sampled_stays_as_it_is(collector: Collector) -> None:
    quiet = SAMPLED[:-1] + "0"
    p0, d0 = await serve_one({"tracing": {"endpoint": collector.url}}, {"traceparent": quiet})
    assert not collector.bodies
    assert {each.seen[0].headers["traceparent"] for each in (p0, d0)} == {quiet}


async def test_a_share_of_none_begins_none_and_a_broken_context_is_left_out(collector: Collector) -> None:
    p0, _ = await serve_one({"tracing": {"endpoint": collector.url, "share": 0}}, {"traceparent": "00-zz-1-01"})
    assert not collector.bodies
    assert "traceparent" not in p0.seen[0].headers


async def test_a_collector_that_is_not_there_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
    said = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(said, "disabled", True)  # it does say so, as an error
    await serve_one({"tracing": {"endpoint": "http://127.0.0.1:1", "timeout_s": 1}}, {})


async def test_without_tracing_a_context_goes_on_as_it_came(start: Start) -> None:
    rig = await start()
    await rig.client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": SAMPLED})
    assert rig["p0"].seen[0].headers["traceparent"] == SAMPLED
    assert rig.gateway.front.edge.traces is None


def test_a_wrong_collector_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint.*localhost"):
        parse({"tracing": {"endpoint": "localhost:4318"}}, "x")
    with pytest.raises(ConfigError, match=r"tracing\.share"):
        parse({"tracing": {"endpoint": "http://c:4318", "share": 2}}, "x")


# ------------------------------------------------------------------------------------- x-omni-timing


def spans_of(header: str) -> dict[str, float]:
    assert re.fullmatch(r"[a-z]+;dur=\d+\.\d{3}(, [a-z]+;dur=\d+\.\d{3})*", header)
    return {name: float(ms) for name, ms in re.findall(r"([a-z]+);dur=([\d.]+)", header)}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_head_tells_where_the_time_went(start: Start, stream: bool) -> None:
    rig = await start()
    answer = await rig.client.post(
        "/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"x-omni-timing": "1"}
    )
    spans = spans_of(answer.headers["x-omni-timing"])
    assert list(spans) == ["queue", "prefill", "handoff", "decode", "total"]
    total = spans.pop("total")
    assert sum(spans.values()) == pytest.approx(total, abs=0.01)


async def test_a_refusal_tells_too_and_nobody_else_is_told(start: Start) -> None:
    rig = await start()
    refused = await rig.client.post(
        "/v1/chat/completions", json={**CHAT, "model": "none"}, headers={"x-omni-timing": "true"}
    )
    assert refused.status_code == 404
    assert list(spans_of(refused.headers["x-omni-timing"])) == ["queue", "total"]
    for headers in ({}, {"x-omni-timing": "0"}, {"x-other": "x-omni-timing: 1"}):
        answer = await rig.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert "x-omni-timing" not in answer.headers
