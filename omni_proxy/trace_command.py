"""`omni-proxy trace`: fetches timelines in Chrome's trace format from a gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from omni_proxy.config import ConfigError


def run_trace(url: str, request_id: str | None, limit: int, out: Path | None, say: Callable[[str], None]) -> int:
    """Save or print a trace. Raises ConfigError where there is none to have."""
    asked: dict[str, str | int] = {"limit": limit} if request_id is None else {"id": request_id}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/omni/trace.json", params=asked, timeout=30.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ConfigError(f"--url {url}: cannot be reached ({type(exc).__name__}: {exc})") from exc
    if answer.status_code != 200:
        raise ConfigError(_refusal(answer, url))
    if out is None:
        say(answer.text)
        return 0
    try:
        out.write_bytes(answer.content)
    except OSError as exc:
        raise ConfigError(f"--out {out}: {exc.strerror or exc}") from exc
    say(f"{out}: open it in chrome://tracing or https://ui.perfetto.dev")
    return 0


def _refusal(answer: httpx.Response, url: str) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"--url {url}: status {answer.status_code}; is it a gateway?"
