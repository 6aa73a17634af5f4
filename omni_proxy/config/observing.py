"""What the gateway writes down about requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from omni_proxy.config.section import PositiveSeconds, Section


class LogFormat(StrEnum):
    """`combined` is the format of nginx and Apache."""

    JSON = "json"
    COMBINED = "combined"


class AccessLog(Section):
    """One line a request. `path: null` writes none, `-` writes to standard output."""

    path: str | None = None
    format: LogFormat = LogFormat.JSON


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


class Tracing(Section):
    """OpenTelemetry spans of requests, sent to a collector (extra [otel])."""

    endpoint: Annotated[str, AfterValidator(_collector)]
    """Where it takes OTLP over HTTP, such as http://127.0.0.1:4318; `/v1/traces` is put behind it."""
    service_name: Annotated[str, Field(min_length=1)] = "omni-proxy"
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of requests whose client brings no trace, so many are traced."""
    headers: dict[str, str] = {}
    """Sent to the collector, such as a key."""
    timeout_s: PositiveSeconds = 10.0
