"""What people write and the keys that they show are in no log, at any level, whatever goes wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from omni_proxy.access.keys import hash_key, make_key
from tests.relay.conftest import Start
from tests.relay.raw import post
from tests.relay.scripted import Seen, decode_stream, prefill_ok

KEY, SECRET, WORKER_KEY = make_key(), "a-secret-prompt", "the-workers-own-key"


@pytest.mark.parametrize("log_format", ["json", "combined"])
async def test_no_prompt_and_no_key(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path, log_format: str
) -> None:
    caplog.set_level(logging.DEBUG)
    for talkative in ("httpx", "httpcore"):  # as the command line sets them
        logging.getLogger(talkative).setLevel(logging.WARNING)

    async def broken(seen: Seen) -> None:
        if seen.json.get("user") == "break":
            await seen.open_stream()
            seen.reset()
        elif seen.json.get("user") == "garbage":
            await seen.send(SECRET.encode() + b"\r\n\r\n")
        else:
            await decode_stream(seen)

    path = tmp_path / "access.log"
    config = {
        "access": {"tenants": {"alice": {"keys": [hash_key(KEY)], "requests_per_minute": 6}}},
        "access_log": {"path": str(path), "format": log_format},
        "each": {"p0": {"api_key": WORKER_KEY}},
    }
    rig = await start(config, p0=prefill_ok, d0=broken)
    base = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    bodies = [json.dumps(base | more).encode() for more in (
        {}, {"stream": True}, {"user": "break", "stream": True}, {"user": "garbage"}, {"temperature": SECRET},
        {"model": "other"}, {}, {"max_tokens": SECRET},
    )] + [SECRET.encode(), b'{"model":"m","messages":"' + SECRET.encode() + b'"}']  # fmt: skip
    for key in (KEY, KEY + "x", SECRET):
        for body in bodies:
            client = await rig.raw()
            await client.send(post(body, f"authorization: Bearer {key}\r\n"))
            assert (await client.response()).status in (200, 400, 401, 404, 429, 502)
            client.close()
    client = await rig.raw()
    await client.send(f"POST /v1/chat/completions HTTP/1.1\r\nauthorization : Bearer {KEY}\r\n\r\n{SECRET}".encode())
    assert (await client.response()).status == 400
    await rig.idle()
    rig.gateway.front._upkeep()
    told = path.read_text() + caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    assert "POST /v1/chat/completions" in told
    assert [text for text in (SECRET, KEY, WORKER_KEY) if text in told] == []
    shown = (await rig.client.get("/health")).text + json.dumps([str(r) for r in rig.gateway.scheduling.last(100)])
    assert SECRET not in shown
