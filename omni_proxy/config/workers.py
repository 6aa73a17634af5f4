"""The workers, and how the gateway deals with them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from omni_proxy.config.section import HostPort, ModelName, PositiveSeconds, Section, WorkerUrl, ZmqEndpoint
from omni_proxy.messages import Role


class ConnectorName(StrEnum):
    """How a worker hands KV over; `workers/connectors/registry.py` has one class for each but `auto`."""

    AUTO = "auto"
    """The worker is asked; one that does not say is not used."""

    VLLM_NIXL = "vllm-nixl"
    VLLM_MOONCAKE = "vllm-mooncake"
    VLLM_P2P_NCCL = "vllm-p2p-nccl"
    ASCEND_MOONCAKE = "ascend-mooncake"
    ASCEND_LAYERWISE = "ascend-layerwise"
    OMNI_LLMDATADIST = "omni-llmdatadist"
    OMNI = "omni"
    SGLANG = "sglang"
    LMCACHE = "lmcache"
    AGGREGATED = "aggregated"


class WorkerTls(Section):
    """How a worker is checked, and what is shown to it. PEM files; they are loaded again when they change."""

    ca: Path | None = None
    """None: the authorities that this system trusts."""
    certificate: Path | None = None
    key: Path | None = None
    """None: it is in the file of the certificate."""
    verify: bool = True
    server_name: Annotated[str, Field(min_length=1)] | None = None
    """Stands for the host of the URL, in the handshake and in the check."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.key is not None and self.certificate is None:
            raise ValueError("'key' needs 'certificate'")
        if self.ca is not None and not self.verify:
            raise ValueError("'ca' means nothing with 'verify: false'")
        return self


class WorkerKvEvents(Section):
    """Where a worker publishes what its prefix cache holds; without `endpoint` it is asked (`/kv_event_sources`)."""

    discover: bool = True
    endpoint: ZmqEndpoint | None = None
    replay_endpoint: ZmqEndpoint | None = None
    topic: str = ""
    ranks: Annotated[int, Field(ge=1, le=256)] = 1
    """Data-parallel ranks: each publishes on a port of its own, counted up from those above."""

    @model_validator(mode="after")
    def _ports_fit(self) -> Self:
        self.check_ports(self.ranks)
        return self

    def check_ports(self, ranks: int) -> None:
        """Raise ValueError where the ports, counted up, do not reach for so many ranks."""
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None and int(endpoint.rpartition(":")[2]) + ranks - 1 > 65535:
                raise ValueError(f"{endpoint} has no port for each of {ranks} ranks")


class Worker(Section):
    """One inference worker. What is left out is asked of the worker itself or taken from its connector."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    url: WorkerUrl
    role: Role
    connector: ConnectorName | None = None
    """None: the worker is asked; P and D that do not say are taken for `vllm-nixl`."""
    models: tuple[ModelName, ...] | dict[ModelName, ModelName] | None = None
    """What it serves: names, or the gateway's names with the worker's own behind them."""
    group: str = ""
    kv_lease_s: PositiveSeconds | None = None
    """How long it keeps KV that nobody pulls, as it was started with; null: what is usual for its connector."""
    max_seqs: Annotated[int, Field(ge=1)] = 32
    max_batch_tokens: Annotated[int, Field(ge=1)] = 32_000
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    backup: bool = False
    """Gets work only while no worker without this mark can be used."""
    slow_start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long it takes to come back to its full share after it was down or ejected."""
    max_fails: Annotated[int, Field(ge=0)] | None = None
    """As in `health`, for this worker."""
    fail_timeout_s: PositiveSeconds | None = None
    down: bool = False
    api_key: str | None = None
    tls: WorkerTls | None = None
    """For an https URL; None there: the system's authorities, no certificate of our own."""
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where decode workers meet a prefill worker in parallel mode: the bootstrap server of SGLang or Mooncake, or an
    embedded worker's side channel. None: as it says, else the engine's default."""
    kv_address: HostPort = ""
    """HOST:PORT at which the KV connector listens (`vllm-p2p-nccl`); empty: as it announces."""
    dp_size: Annotated[int, Field(ge=1, le=256)] | None = None
    """Data-parallel ranks behind the URL, each with limits like these; None: as the worker says, else one."""
    checks: bool = True
    """Refuse it where what it says of itself does not fit its connector, its role, or its partners."""
    kv_events: WorkerKvEvents = WorkerKvEvents()

    @property
    def model_names(self) -> Mapping[str, str]:
        """What it calls the models, where a name for that is given."""
        return self.models if isinstance(self.models, dict) else {}

    @model_validator(mode="after")
    def _ranks_have_ports(self) -> Self:
        self.kv_events.check_ports(self.dp_size or 1)
        return self

    @model_validator(mode="after")
    def _tls_needs_https(self) -> Self:
        if self.tls is not None and not self.url.startswith("https:"):
            raise ValueError(f"'tls' needs an https URL, not {self.url}")
        return self


class Keepalive(Section):
    """Idle connections to workers; shorter than the engines' own 5 s, or they close under us."""

    idle_s: PositiveSeconds = 4.0
    max_idle: Annotated[int, Field(ge=0)] = 1024


class Health(Section):
    """Active probes, and when failing requests take a worker out (`max_fails: 0`: never)."""

    interval_s: PositiveSeconds = 1.0
    timeout_s: PositiveSeconds = 5.0
    failures_down: Annotated[int, Field(ge=1)] = 2
    experts_interval_s: PositiveSeconds | None = 15.0
    """How often workers that count tokens by expert are asked for it; null: never."""
    max_fails: Annotated[int, Field(ge=0)] = 1
    fail_timeout_s: PositiveSeconds = 10.0


class Retries(Section):
    """Bounds of trying again; what may be tried again at all is fixed (docs/architecture.md)."""

    max: Annotated[int, Field(ge=0, le=10)] = 2
