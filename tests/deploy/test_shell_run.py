"""The script of a recipe with the embedded engine, run for real: 1P1D and a gateway on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from omni_proxy.deploy.command import run_render

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


async def test_one_prefill_and_one_decode_worker_answer(tmp_path: Path) -> None:
    gateway, p, p_kv, d, d_kv = free_ports(5)
    recipe = {
        "name": "here",
        "served_model_name": "omni-demo",
        "hosts": {"here": {"address": "127.0.0.1"}},
        "prefill": {"at": [{"host": "here", "port": p, "kv_port": p_kv}]},
        "decode": {"at": [{"host": "here", "port": d, "kv_port": d_kv}]},
        "gateway": {"host": "here", "config": {"listen": {"port": gateway}}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_render(tmp_path / "recipe.yaml", "shell", tmp_path, lambda _: None)
    program = tmp_path / "omni-proxy"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m omni_proxy "$@"\n')
    program.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *("bash", str(tmp_path / "here.sh")),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    ask = {"model": "omni-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway}", timeout=60, trust_env=False) as client:
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        found = (await client.get("/omni/workers")).json()["workers"]
                        if [w["state"] for w in found] == ["up", "up"]:
                            break
                    await asyncio.sleep(0.2)
            answer = await client.post("/v1/chat/completions", json=ask)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            ended = (await client.get("/omni/requests")).json()["ended"][0]
            assert ended["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 143
        for port in (gateway, p, d):
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
