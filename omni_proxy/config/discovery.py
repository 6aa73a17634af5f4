"""Where workers are found besides the config, and which other gateways stand before them."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from omni_proxy.config.section import Port, PositiveSeconds, Section, WorkerUrl, ZmqEndpoint
from omni_proxy.config.workers import Worker


class Announcements(Section):
    """Where workers with the connector `vllm-p2p-nccl` announce themselves, over ZeroMQ."""

    listen: ZmqEndpoint
    expire_s: PositiveSeconds = 15.0
    """One that is silent for so long has gone; vLLM speaks every few seconds."""
    group: str = ""
    max_seqs: Annotated[int, Field(ge=1)] = 32
    """As in `workers`, for all that come."""
    networks: tuple[IPv4Network | IPv6Network, ...] | None = None
    """As in `discovery`."""


class Kubernetes(Section):
    """Pods that are workers; what they are stands in their annotations (docs/deploy.md)."""

    selector: Annotated[str, Field(min_length=1)]
    """Of labels, as kubectl takes it."""
    endpoints: bool = False
    """Follow the EndpointSlices of services (`kubernetes.io/service-name=NAME`) instead of pods."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] = "default"
    api: WorkerUrl | None = None
    """None: that of the cluster in which the gateway runs, with its service account."""


class Dns(Section):
    """Workers behind a name in DNS (docs/deploy.md)."""

    name: Annotated[str, Field(min_length=1)]
    record: Literal["a", "srv"] = "a"
    """`a`: its addresses of both kinds, with `port`; `srv`: the hosts and ports that it lists."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    worker: dict[str, Any]
    """What each of them is: `role` and whatever else `workers` has, but for name and URL."""
    least_s: Annotated[float, Field(ge=0.1)] = 1.0
    most_s: PositiveSeconds = 30.0
    """It is asked again after the answer's time to live, within these bounds."""
    nameserver: str | None = None
    """ADDRESS or ADDRESS:PORT; None: as the system is set up."""

    @model_validator(mode="after")
    def _makes_workers(self) -> Self:
        if (self.port is None) == (self.record == "a"):
            raise ValueError("'port' is needed for record 'a', and no other")
        if self.least_s > self.most_s:
            raise ValueError(f"'least_s' ({self.least_s:g}) must not be above 'most_s' ({self.most_s:g})")
        scheme = "https" if self.worker.get("tls") is not None else "http"
        try:
            Worker.model_validate({**self.worker, "name": "any", "url": f"{scheme}://any:1"})
        except ValidationError as exc:
            first = exc.errors()[0]
            raise ValueError(f"worker.{'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
        return self


class Registration(Section):
    """Where workers register themselves, a port apart (docs/deploy.md)."""

    host: str = "127.0.0.1"
    port: Port
    token: Annotated[str, Field(min_length=8)] | None = None
    """Shown as `Authorization: Bearer`; needed where others than this machine can connect."""
    expire_s: Annotated[float, Field(ge=0.5)] = 15.0
    """Who is silent for so long drains; they are told to speak three times as often."""

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.token is None and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(f"host {self.host} is open to others: 'token' is required")
        return self


class Discovery(Section):
    """Where workers are found besides `workers`; of two with the same URL that of the config counts."""

    file: Path | None = None
    """YAML with `workers:`, read again whenever it changes."""
    kubernetes: Kubernetes | None = None
    dns: tuple[Dns, ...] = ()
    registration: Registration | None = None
    networks: tuple[IPv4Network | IPv6Network, ...] | None = None
    """Where such workers may be; null: anywhere but at link-local and metadata addresses (docs/security.md)."""


def _redis_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError("must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH")
    return url


class Replicas(Section):
    """Other gateways before the same workers (docs/deploy.md); those with the same `group` share one view."""

    redis: Annotated[str, AfterValidator(_redis_url)]
    """Or Valkey."""
    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """Of this gateway; None: made of the host's name and a random part."""
    report_s: Annotated[float, Field(ge=0.001, le=1)] = 0.01
    """At most so often what is held here is told to the others."""
    lease_s: Annotated[float, Field(ge=0.5, le=60)] = 3.0
    """A gateway that was not heard for so long is gone, with all that it held."""
