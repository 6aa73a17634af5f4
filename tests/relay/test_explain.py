"""`/omni/requests/ID/explain` and `omni-proxy explain ID`."""

from __future__ import annotations

import asyncio
import json

import pytest

from omni_proxy.cli import main
from tests.relay.conftest import Start
from tests.relay.scripted import Seen, decode_stream, prefill_ok


async def slowly(seen: Seen) -> None:
    await asyncio.sleep(0.2)
    await prefill_ok(seen)


async def test_a_request_is_explained_over_http_and_in_the_shell(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = await start(p0=slowly, d0=decode_stream)
    response = await rig.chat(stream=True)
    rid = response.headers["x-request-id"]
    told = (await rig.client.get(f"/omni/requests/{rid}/explain")).json()
    timeline = await rig.timeline(response)
    assert told["id"] == rid
    assert told["seconds"] == pytest.approx(timeline["e2e_s"], abs=1e-5)
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"], abs=1e-4)
    computing = sum(told["causes"].get(cause, 0) for cause in ("computing", "slow_worker"))
    assert computing >= 0.19
    url = f"--url=http://127.0.0.1:{rig.port}"
    assert await asyncio.to_thread(main, ["explain", rid, url]) == 0
    shown = capsys.readouterr().out
    assert "computing the prompt on p0" in shown
    assert "What would have made it faster:" in shown
    assert await asyncio.to_thread(main, ["explain", rid, url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told


async def test_an_unknown_request_and_a_gateway_that_is_none(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    answer = await rig.client.get("/omni/requests/nobody/explain")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "request_id"
    url = f"--url=http://127.0.0.1:{rig.port}"
    assert await asyncio.to_thread(main, ["explain", "nobody", url]) == 1
    assert "No request" in capsys.readouterr().out
    worker = f"--url=http://127.0.0.1:{rig['p0'].port}"
    assert await asyncio.to_thread(main, ["explain", "x", worker]) == 2
    assert "is no gateway" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["explain", "x", "--url=http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
