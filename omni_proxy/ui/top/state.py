"""What the terminal reads of `/omni/ui/state`, and where it gets it."""

from __future__ import annotations

from typing import Final

import httpx
import msgspec
from msgspec import Struct

from omni_proxy.config import ConfigError
from omni_proxy.ui.heat import Heat
from omni_proxy.ui.points import Limits, Point
from omni_proxy.ui.rows import Row

TIMEOUT_S: Final = 5.0


class SeenWorker(Struct, frozen=True):
    """What is shown of a worker."""

    name: str
    current_role: str
    state: str
    sequences: int
    max_sequences: int
    prefill_tokens: int
    kv_tokens: int
    prefill_free_s: float
    kv_capacity_tokens: int | None = None
    stranded_kv_tokens: int = 0
    reason: str | None = None


class State(Struct, frozen=True):
    """A gateway at one instant."""

    version: str
    now: float
    ready: bool
    limits: Limits
    waiting: int
    waiting_tokens: int
    live_count: int
    window: Point
    workers: list[SeenWorker]
    live: list[Row]
    ended: list[Row]
    points: list[Point]
    experts: list[Heat] | None = None


class Unreadable(Exception):
    """The gateway cannot be read now; the text says why."""


class Source:
    """Reads one gateway's state again and again. Raises ConfigError for what is no URL."""

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL: it must begin with http:// or https://")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.url = url.rstrip("/")
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        except (httpx.InvalidURL, ValueError) as exc:
            raise ConfigError(f"{url!r} is no URL: {exc}") from exc

    def read(self) -> State:
        """The state at this instant. Raises Unreadable."""
        try:
            answer = self._client.get("/omni/ui/state")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise Unreadable(f"{self.url} cannot be reached ({type(exc).__name__})") from exc
        if answer.status_code == 401:
            raise Unreadable(f"{self.url} wants its token: --token-file, or -c with the gateway's config")
        if answer.status_code != 200:
            hint = "; where the config names an admin port, it is there" if answer.status_code == 404 else ""
            raise Unreadable(f"{self.url}/omni/ui/state says {answer.status_code}{hint}")
        try:
            return msgspec.json.decode(answer.content, type=State)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise Unreadable(f"{self.url}/omni/ui/state is not what it should be: {exc}") from exc

    def close(self) -> None:
        self._client.close()
