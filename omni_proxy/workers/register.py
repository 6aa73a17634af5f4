"""A worker's side of registration: says to gateways that it is there, again and again, and goodbye in the end.

Trouble with one gateway is logged once and tried again; it never stops the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx

logger = logging.getLogger(__name__)

_RETRY_S: Final = 2.0
_LEAST_S: Final = 0.1
_MOST_S: Final = 60.0


class Registration:
    """One worker at any number of gateways. `fields` as in the gateway's config; the token's file is read each time."""

    def __init__(self, urls: Sequence[str], token_file: Path | None, fields: Mapping[str, object]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._token_file = token_file
        self._fields = fields

    async def run(self) -> None:
        """Until cancelled; then says goodbye."""
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            try:
                await asyncio.gather(*(self._stay(client, url) for url in self._urls))
            finally:
                await asyncio.gather(*(self._leave(client, url) for url in self._urls))

    async def _stay(self, client: httpx.AsyncClient, url: str) -> None:
        said = ""
        while True:
            wait_s, fault = _RETRY_S, ""
            try:
                answer = await client.post(f"{url}/omni/register", json=self._fields, headers=self._headers())
                if answer.status_code == 200:
                    wait_s = min(_MOST_S, max(_LEAST_S, float(answer.json()["again_in_s"])))
                else:
                    fault = f"status {answer.status_code}: {answer.text[:300]}"
            except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as exc:
                fault = f"{type(exc).__name__}: {exc}"
            if fault and fault != said:
                logger.warning("not registered at %s: %s", url, fault)
            elif said and not fault:
                logger.warning("registered at %s again", url)
            said = fault
            await asyncio.sleep(wait_s)

    async def _leave(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            name = quote(str(self._fields["name"]), safe="")
            await client.delete(f"{url}/omni/register/{name}", headers=self._headers(), timeout=1.0)
        except (httpx.HTTPError, OSError) as exc:
            logger.debug("no goodbye to %s: %s", url, exc)

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        return {"authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}
