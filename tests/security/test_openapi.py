"""Schemathesis against the OpenAPI document that the gateway itself shows, over sockets. Run with `-m schemathesis`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.relay.conftest import Start

pytestmark = [
    pytest.mark.schemathesis,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis"),
]


async def test_no_request_makes_an_error_of_ours(start: Start, tmp_path: Path) -> None:
    rig = await start()
    url = f"http://127.0.0.1:{rig.port}/openapi.json"
    checks = "not_a_server_error,unsupported_method"
    command = ("-m", "schemathesis.cli", "run", url, "--checks", checks, "--max-examples", "40", "--seed", "1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    await rig.idle()
    assert (await rig.chat()).status_code == 200
