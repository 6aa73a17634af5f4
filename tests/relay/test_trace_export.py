"""Timelines as Chrome traces: over HTTP and from the command line, checked against the format."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.cli import main
from omni_proxy.messages import Leg, Mode, Outcome, Placement, RequestRecord, Stage
from omni_proxy.observe.chrome_trace import chrome_trace
from tests.relay.conftest import Start


def check_format(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What the trace event format asks of the events that are used here; rows hold one span at a time."""
    json.dumps(trace)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in events:
        assert isinstance(one["name"], str)
        assert one["ph"] in "XMi"
        if one["ph"] == "M":
            assert isinstance(one["args"]["name"], str)
            continue
        assert one["ts"] >= 0
        assert (one["pid"], one["tid"]) in named
        assert one["pid"] in processes
        assert isinstance(one["args"], dict)
        if one["ph"] == "X":
            assert one["dur"] >= 0
            rows.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
        else:
            assert one["s"] in "gpt"
    for spans in rows.values():
        spans.sort()
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(spans))
    return events


def record(name: str, begin: float, mode: Mode = Mode.SEQUENTIAL, ended: bool = True) -> RequestRecord:
    marks = [
        (Stage.RECEIVED, begin, 0),
        (Stage.PREFILL_WAITING, begin + 0.1, 0),
        (Stage.PREFILL_SCHEDULED, begin + 0.2, 1),
    ]
    if mode is Mode.PARALLEL:
        marks += [(Stage.DECODE_SCHEDULED, begin + 0.2, 2), (Stage.PREFILL_RUNNING, begin + 0.3, 1)]
    else:
        marks += [(Stage.PREFILL_RUNNING, begin + 0.3, 1), (Stage.DECODE_WAITING, begin + 1.0, 1)]
        marks += [(Stage.DECODE_SCHEDULED, begin + 1.1, 2)]
    marks += [(Stage.DECODE_RUNNING, begin + 1.2, 2)]
    if ended:
        marks += [(Stage.FINISHED, begin + 2.0, 2)]
    return RequestRecord(
        rid=name,
        external_id=name,
        model="m",
        endpoint="/v1/chat/completions",
        stream=True,
        mode=mode,
        marks=tuple(marks),
        prefill_done_at=begin + 1.0,
        first_token_at=begin + 1.3,
        outcome=Outcome.COMPLETED if ended else None,
        error=None,
        detail="",
        placements=(Placement("p0", Leg.PREFILL, ""), Placement("d0", Leg.DECODE, "")),
        attempts=2,
        prompt_tokens=10,
        cached_tokens=None,
        completion_tokens=3,
    )


def test_requests_at_once_have_rows_of_their_own() -> None:
    records = [record("a", 0.0), record("b", 1.0), record("c", 2.5), record("d", 2.6, Mode.PARALLEL, ended=False)]
    trace = chrome_trace(records, 10.0, 1e9)
    assert trace["otherData"] == {"begin": 1e9, "unit_of_begin": "seconds since 1970"}
    events = check_format(trace)
    row = {e["args"]["id"]: e["tid"] for e in events if e["ph"] == "X" and e["name"] == "RECEIVED"}
    assert row == {"a": 1, "b": 2, "c": 1, "d": 3}  # c has row 1 until 4.5, b had row 2 until 3.0
    workers = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(workers) == {"gateway", "p0", "d0"}
    held = [e for e in events if e["ph"] == "X" and e["pid"] == workers["p0"]]
    assert [(e["name"], e["dur"]) for e in held] == [("a", 0.8e6), ("b", 0.8e6), ("c", 0.8e6), ("d", 0.8e6)]
    assert held[0]["ts"] == 0.2e6


def test_nothing_is_a_trace_too() -> None:
    assert [e["ph"] for e in check_format(chrome_trace([], 0.0, 0.0))] == ["M"]


async def test_a_gateway_exports_and_the_command_saves(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = await start()
    await asyncio.gather(*(rig.chat(stream=True) for _ in range(8)))
    name = (await rig.chat()).headers["x-request-id"]
    events = check_format((await rig.client.get("/omni/trace.json")).json())
    assert len({e["args"]["id"] for e in events if e["ph"] == "X"}) == 9
    one = check_format((await rig.client.get("/omni/trace.json", params={"id": name})).json())
    assert {e["args"]["id"] for e in one if e["ph"] == "X"} == {name}
    missing = await rig.client.get("/omni/trace.json?id=nobody")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")

    url, out = f"http://127.0.0.1:{rig.port}", tmp_path / "trace.json"
    assert await asyncio.to_thread(main, ["trace", "--url", url, "--out", str(out)]) == 0
    assert len(check_format(json.loads(out.read_text()))) == len(events)
    assert await asyncio.to_thread(main, ["trace", "--url", url, name]) == 0
    assert check_format(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert await asyncio.to_thread(main, ["trace", "--url", url, "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def test_a_gateway_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
