"""The ports of the gateway, and what clients may send there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from omni_proxy.config.section import MIB, Port, PositiveSeconds, Section


class ListenTls(Section):
    """HTTPS for clients. PEM files; they are loaded again when they change."""

    certificate: Path
    """With the chain behind it."""
    key: Path | None = None
    """None: it is in the file of the certificate."""
    client_ca: Path | None = None
    """Clients must show a certificate of this authority."""


class Listen(Section):
    """Where clients connect."""

    host: str = "127.0.0.1"
    port: Port = 8000
    backlog: Annotated[int, Field(ge=1)] = 4096
    tls: ListenTls | None = None


class Admin(Section):
    """Where operators connect, apart from clients."""

    host: str = "127.0.0.1"
    port: Port
    token: Annotated[str, Field(min_length=8)] | None = None
    """Shown as `Authorization: Bearer`; needed where others than this machine can connect."""
    tokens: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]+$")], Annotated[str, Field(min_length=8)]] = {}
    """More of them, by whose they are: so operators are called in the audit log."""
    audit_log: Path | None = None
    """What was done, a line of JSON for each; None: these lines go to the gateway's log."""

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.token is None and not self.tokens and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(f"host {self.host} is open to others: 'token' is required")
        return self


class Limits(Section):
    """What clients may send and how much may wait."""

    client_max_body_bytes: Annotated[int, Field(ge=1)] = 64 * MIB
    client_max_head_bytes: Annotated[int, Field(ge=1024)] = 64 << 10
    client_max_headers: Annotated[int, Field(ge=8)] = 100
    client_min_bytes_per_s: Annotated[int, Field(ge=0)] = 500
    """A body that comes slower than this, on the average after `client_body_s`, is given up; 0: none is."""
    connections_per_client: Annotated[int, Field(ge=1)] | None = None
    """From one address to one front process; null: no limit."""
    max_waiting_requests: Annotated[int, Field(ge=0)] = 4096
    max_waiting_tokens: Annotated[int, Field(ge=0)] = 16_000_000
    queue_timeout_s: PositiveSeconds = 60.0
    no_worker_timeout_s: PositiveSeconds = 10.0


class Callbacks(Section):
    """Where workers that go first ask this gateway for their prefill (`ascend-layerwise`): plain HTTP, a port apart."""

    host: Annotated[str, Field(min_length=1)]
    """By which workers reach the gateway."""
    port: Port = 0
    """0: one that is free. With several processes each has its own."""
    listen_host: Annotated[str, Field(min_length=1)] | None = None
    """None: the same as `host`."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.host in ("0.0.0.0", "::", "*"):
            raise ValueError(f"'host' must be an address that workers can reach, not {self.host}")
        return self


class Timeouts(Section):
    """Upstream time limits. There is none on the whole: an answer may stream for hours."""

    connect_s: PositiveSeconds = 5.0
    first_byte_s: PositiveSeconds = 600.0
    inter_chunk_s: PositiveSeconds = 300.0
    client_keepalive_s: PositiveSeconds = 75.0
    client_head_s: PositiveSeconds = 30.0
    """From the first byte of a request to the end of its head."""
    client_body_s: PositiveSeconds = 60.0
    """Between two parts of a body."""
    client_send_s: PositiveSeconds = 60.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
