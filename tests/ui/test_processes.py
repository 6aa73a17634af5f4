"""The page behind several front processes: one scheduler feeds it through any of them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.processes.test_processes import BODY, Running, running

__all__ = ["running"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_fronts_pass_the_events_on_and_end_them_when_they_drain(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
        page = await client.get("/omni/ui")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/omni/ui/files/main.js")).headers["content-type"].startswith("text/javascript")
        async with client.stream("GET", "/omni/ui/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines))[6:])
            assert first["whole"] is True
            asked = await client.post("/v1/chat/completions", json=BODY)
            assert asked.status_code == 200
            async with asyncio.timeout(15):
                async for line in lines:
                    if line and json.loads(line[6:])["ended"]:
                        break
            running.process.terminate()
            async with asyncio.timeout(15):
                async for _ in lines:
                    pass
            async with asyncio.timeout(15):
                assert await running.process.wait() == 0
