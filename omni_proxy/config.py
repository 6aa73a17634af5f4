"""The gateway's configuration: frozen models, and the only reader of files and environment.

Load, validate (also across fields), then never write again. Every error names its place in the file and the value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from omni_proxy.access.keys import read_hash
from omni_proxy.messages import Mode, Role
from omni_proxy.overrides import Place, Unusable, overridden, with_secrets

MIB = 1 << 20
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class ConfigError(Exception):
    """One or more faults in a config; each line names the file, the place in it and the value."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScheduleMode(StrEnum):
    """`auto` picks per model what its workers can do."""

    AUTO = "auto"
    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    AGGREGATED = "aggregated"

    @property
    def mode(self) -> Mode | None:
        return None if self is ScheduleMode.AUTO else Mode(self.value)


class KvCachePolicy(StrEnum):
    """`apc`: prompts are tokenised and matched against what workers hold; `independent`: neither."""

    APC = "apc"
    INDEPENDENT = "independent"


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


class LogFormat(StrEnum):
    """`combined` is the format of nginx and Apache."""

    JSON = "json"
    COMBINED = "combined"


def _worker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError("must name scheme, host and port only")
    try:
        _ = parts.port
    except ValueError as exc:
        raise ValueError("has an impossible port") from exc
    return url.rstrip("/")


PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
WorkerUrl = Annotated[str, AfterValidator(_worker_url)]


class ListenTls(_Model):
    """HTTPS for clients. PEM files; they are loaded again when they change."""

    certificate: Path
    """With the chain behind it."""
    key: Path | None = None
    """None: it is in the file of the certificate."""
    client_ca: Path | None = None
    """Clients must show a certificate of this authority."""


class WorkerTls(_Model):
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


class Listen(_Model):
    """Where clients connect."""

    host: str = "127.0.0.1"
    port: Port = 8000
    backlog: Annotated[int, Field(ge=1)] = 4096
    tls: ListenTls | None = None


class Admin(_Model):
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


def _key_hash(text: str) -> str:
    read_hash(text)
    return text


KeyHash = Annotated[str, AfterValidator(_key_hash)]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class Tenant(_Model):
    """Who asks, by the keys that he may show. Limits hold for all of them and all front processes together."""

    keys: Annotated[tuple[KeyHash, ...], Field(min_length=1)]
    """Hashes as `omni-proxy key` prints them."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Of prompts and answers."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Requests that run at once."""


def _route(path: str) -> str:
    if not path.startswith("/") or "*" in path.removesuffix("/*") or "?" in path:
        raise ValueError("must be a path, or a path with /* at its end")
    return path


Route = Annotated[str, AfterValidator(_route)]


class Access(_Model):
    """Who may ask for what on the clients' port (docs/security.md)."""

    tenants: dict[TenantName, Tenant] = {}
    """By name; where there are any, requests need a key of one of them."""
    tenants_file: Path | None = None
    """YAML with further `tenants:`, read with the config."""
    routes: tuple[Route, ...] | None = None
    """All that is served; null: every route that the gateway knows."""
    open_routes: tuple[Route, ...] = ("/health", "/ready")
    """Need no key."""

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.tenants) or self.tenants_file is not None

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Self:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                other = owners.setdefault(key, name)
                if other != name:
                    raise ValueError(f"tenants {other} and {name} have the same key")
        return self


def _zmq_endpoint(endpoint: str) -> str:
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not host or host == "*" or not port.isdigit():
        raise ValueError("must be tcp://HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise ValueError("has an impossible port")
    return endpoint


def _host_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address and (not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535):
        raise ValueError("must be HOST:PORT")
    return address


ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]


class WorkerKvEvents(_Model):
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


ModelName = Annotated[str, Field(min_length=1)]


class Worker(_Model):
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
    kv_address: Annotated[str, AfterValidator(_host_port)] = ""
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


class Model(_Model):
    """The model's folder, for its tokenizer and chat template."""

    path: Path | None = None
    adapters: tuple[str, ...] = ()
    """Names under which LoRA adapters of it are served: their prompts share no KV with those of others."""
    send_token_ids: bool = False
    """Workers get token ids instead of text where their protocol has a place for them; the folder must be theirs."""


class Thinking(_Model):
    """Requests in which the model thinks before it answers; the lengths of their answers are predicted apart."""

    default: bool = False
    """Does it think where a request says nothing about that?"""
    budget_tokens: dict[str, Annotated[int, Field(ge=0)]] = {}
    """`thinking_token_budget` for requests that name none, by `reasoning_effort`; `default` where there is none."""


class ServedModel(Model):
    """One of several models of a gateway, or other names of one."""

    name: ModelName
    """By which its workers are found."""
    aliases: tuple[ModelName, ...] = ()
    """Other names that clients may use; answers say what the client said."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    """Added to that of each request."""
    schedule_mode: ScheduleMode | None = None
    """None: as for all."""
    aggregate_below_tokens: Annotated[int, Field(ge=0)] | None = None
    """As in `scheduling`; None: as there."""
    thinking: Thinking = Thinking()


class Limits(_Model):
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


class OrderName(StrEnum):
    """Who goes first among those that wait for a prefill worker (docs/scheduling.md)."""

    WEIGHTED = "weighted"
    FCFS = "fcfs"
    SHORTEST_UNCACHED = "shortest-uncached"
    DEADLINE = "deadline"
    OMNI_NGINX = "omni-nginx"


Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
PriorityClass = Annotated[int, Field(ge=-(2**63) + 1, le=2**63 - 1)]


class LengthBucket(_Model):
    """Workers that are preferred for prompts of some length, from that of the bucket before on."""

    up_to_tokens: Annotated[int, Field(ge=1)] | None = None
    """None, in the last one only: all that are longer."""
    workers: Annotated[tuple[str, ...], Field(min_length=1)]


class Scheduling(_Model):
    """What runs next, and where."""

    order: OrderName = OrderName.WEIGHTED
    length_weight: Weight = 0.8
    wait_weight: Weight = 0.2
    apc_weight: Weight = 0.0
    """Weights of the order `weighted`; those of length and wait are also its meaning in Omni Proxy for nginx."""
    starvation_timeout_s: PositiveSeconds = 30.0
    """Who has waited longer goes before all others, as far as `starved_share` goes."""
    starved_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the workers' time that the late have while others wait, too; 1: all. Not for orders `fcfs` and `deadline`."""
    ageing: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = 1.0
    """Who has waited that many times as long as in order of arrival is late, too, within its class; null: nobody is."""
    fair_tenants: bool = False
    """Share the workers between tenants."""
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = {}
    ttft_target_s: PositiveSeconds | None = None
    """For the order `deadline`: the target of requests that name none, where their class has none either."""
    ttft_targets_s: dict[PriorityClass, PositiveSeconds] = {}
    """Targets by the client's `priority`."""
    tpot_limit_s: PositiveSeconds | None = None
    """An answer waits rather than go to a worker whose steps would then take longer than this."""
    tpot_limits_s: dict[PriorityClass, PositiveSeconds] = {}
    """Limits by the client's `priority`; that of whoever runs on a worker already holds there, too."""
    length_buckets: tuple[LengthBucket, ...] = ()
    """Preferred workers by prompt length, the shortest first."""
    overflow_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """A prompt leaves the workers of its bucket for one that would serve it sooner by so much."""
    elastic_roles: bool = False
    """Mixed workers prefill or decode, and change sides as the load does; else each does both for its requests."""
    work_weight: Weight = 2.0
    """How much a second of a worker's time counts against a second of waiting."""
    aggregate_below_tokens: Annotated[int, Field(ge=0)] | None = 0
    """Prompts with fewer tokens to compute need no handoff; 0: all are handed over; null: decided by cost."""

    @model_validator(mode="after")
    def _weights_weigh(self) -> Self:
        if self.order is OrderName.WEIGHTED and self.length_weight + self.wait_weight + self.apc_weight <= 0:
            raise ValueError("order 'weighted' needs a weight above 0")
        return self

    @model_validator(mode="after")
    def _buckets_ascend(self) -> Self:
        bounds = [bucket.up_to_tokens for bucket in self.length_buckets]
        inner = [bound for bound in bounds[:-1] if bound is not None]
        if len(inner) < len(bounds) - 1:
            raise ValueError("length_buckets: only the last one may be without 'up_to_tokens'")
        last = bounds[-1] if bounds else None
        ordered = [*inner, last] if last is not None else inner
        if ordered != sorted(set(ordered)):
            raise ValueError(f"length_buckets: 'up_to_tokens' must rise from one to the next, not {ordered}")
        return self


class Callbacks(_Model):
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


class Announcements(_Model):
    """Where workers with the connector `vllm-p2p-nccl` announce themselves, over ZeroMQ."""

    listen: ZmqEndpoint
    expire_s: PositiveSeconds = 15.0
    """One that is silent for so long has gone; vLLM speaks every few seconds."""
    group: str = ""
    max_seqs: Annotated[int, Field(ge=1)] = 32
    """As in `workers`, for all that come."""
    networks: tuple[IPv4Network | IPv6Network, ...] | None = None
    """As in `discovery`."""


class Timeouts(_Model):
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


class Keepalive(_Model):
    """Idle connections to workers; shorter than the engines' own 5 s, or they close under us."""

    idle_s: PositiveSeconds = 4.0
    max_idle: Annotated[int, Field(ge=0)] = 1024


class Health(_Model):
    """Active probes, and when failing requests take a worker out (`max_fails: 0`: never)."""

    interval_s: PositiveSeconds = 1.0
    timeout_s: PositiveSeconds = 5.0
    failures_down: Annotated[int, Field(ge=1)] = 2
    experts_interval_s: PositiveSeconds | None = 15.0
    """How often workers that count tokens by expert are asked for it; null: never."""
    max_fails: Annotated[int, Field(ge=0)] = 1
    fail_timeout_s: PositiveSeconds = 10.0


class Retries(_Model):
    """Bounds of trying again; what may be tried again at all is fixed (docs/architecture.md)."""

    max: Annotated[int, Field(ge=0, le=10)] = 2


class AccessLog(_Model):
    """One line a request. `path: null` writes none, `-` writes to standard output."""

    path: str | None = None
    format: LogFormat = LogFormat.JSON


def _redis_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError("must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH")
    return url


class Replicas(_Model):
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


class Kubernetes(_Model):
    """Pods that are workers; what they are stands in their annotations (docs/deploy.md)."""

    selector: Annotated[str, Field(min_length=1)]
    """Of labels, as kubectl takes it."""
    endpoints: bool = False
    """Follow the EndpointSlices of services (`kubernetes.io/service-name=NAME`) instead of pods."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] = "default"
    api: WorkerUrl | None = None
    """None: that of the cluster in which the gateway runs, with its service account."""


class Dns(_Model):
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


class Registration(_Model):
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


class Discovery(_Model):
    """Where workers are found besides `workers`; of two with the same URL that of the config counts."""

    file: Path | None = None
    """YAML with `workers:`, read again whenever it changes."""
    kubernetes: Kubernetes | None = None
    dns: tuple[Dns, ...] = ()
    registration: Registration | None = None
    networks: tuple[IPv4Network | IPv6Network, ...] | None = None
    """Where such workers may be; null: anywhere but at link-local and metadata addresses (docs/security.md)."""


class Prewarm(_Model):
    """Compute what next turns will begin with while prefill workers are idle (docs/prewarm.md), and how much of it."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Of each prefill worker's time."""
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Over all workers; None: no bound but the share."""
    max_tokens: Annotated[int, Field(ge=16)] = 4096
    """Most tokens that one next turn may leave to compute: so long may real work be held up."""
    wait_s: Annotated[float, Field(gt=0)] = 60.0
    """How long one may wait for its worker to be idle."""
    priority: int | None = None
    """The field `priority` of what is sent, for engines that schedule by it; None: none is sent."""


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


class Tracing(_Model):
    """OpenTelemetry spans of requests, sent to a collector (extra [otel])."""

    endpoint: Annotated[str, AfterValidator(_collector)]
    """Where it takes OTLP over HTTP, such as http://127.0.0.1:4318; `/v1/traces` is put behind it."""
    service_name: Annotated[str, Field(min_length=1)] = "omni-proxy"
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of requests whose client brings no trace, so many are traced."""
    headers: dict[str, str] = {}
    """Sent to the collector, such as a key."""
    timeout_s: PositiveSeconds = 10.0


class Config(_Model):
    """Everything an operator may set for one gateway."""

    listen: Listen = Listen()
    admin: Admin | None = None
    """None: there is no admin port."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    schedule_mode: ScheduleMode = ScheduleMode.AUTO
    kv_cache_policy: KvCachePolicy = KvCachePolicy.APC
    model: Model = Model()
    """Of every model that `models` does not name."""
    models: tuple[ServedModel, ...] = ()
    workers: tuple[Worker, ...] = ()
    access: Access = Access()
    limits: Limits = Limits()
    scheduling: Scheduling = Scheduling()
    timeouts: Timeouts = Timeouts()
    keepalive: Keepalive = Keepalive()
    health: Health = Health()
    retries: Retries = Retries()
    callbacks: Callbacks | None = None
    announcements: Announcements | None = None
    resume: bool | tuple[Annotated[str, Field(min_length=1)], ...] = False
    """Streams whose decode worker dies go on with another pair (docs/resume.md): of all models, or of those named."""
    prewarm: bool | Prewarm = False
    """True: with its defaults."""
    discovery: Discovery = Discovery()
    replicas: Replicas | None = None
    """None: this gateway is the only one before its workers."""
    access_log: AccessLog = AccessLog()
    tracing: Tracing | None = None
    """None: no spans, and a client's `traceparent` goes on to the workers as it came."""
    record: str | None = None
    """A file for the core's events and effects, for `omni-proxy replay`."""
    timelines: Annotated[int, Field(ge=0)] = 1000
    """How many ended requests `/omni/requests` remembers."""

    @model_validator(mode="after")
    def _callbacks_can_be_heard(self) -> Self:
        asking = [w.name for w in self.workers if w.connector is ConnectorName.ASCEND_LAYERWISE]
        if asking and self.callbacks is None:
            raise ValueError(f"'callbacks' is needed for the connector ascend-layerwise of {', '.join(asking)}")
        if self.callbacks is not None and self.callbacks.port and self.processes > 1:
            raise ValueError("'callbacks.port' must be 0 with several processes: each listens on its own")
        return self

    @model_validator(mode="after")
    def _prewarm_knows_prefixes(self) -> Self:
        if self.prewarm is not False and self.kv_cache_policy is not KvCachePolicy.APC:
            raise ValueError(
                "'prewarm' needs kv_cache_policy: apc: next turns go to no worker in particular without it"
            )
        return self

    @model_validator(mode="after")
    def _workers_are_distinct(self) -> Self:
        for what, values in (("name", [w.name for w in self.workers]), ("url", [w.url for w in self.workers])):
            doubled = sorted({v for v in values if values.count(v) > 1})
            if doubled:
                raise ValueError(f"two workers have the same {what}: {', '.join(doubled)}")
        return self

    @model_validator(mode="after")
    def _models_are_distinct(self) -> Self:
        names = [name for m in self.models for name in (m.name, *m.aliases, *m.adapters)]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"models: two have the same name: {', '.join(doubled)}")
        return self

    @model_validator(mode="after")
    def _prefill_has_decode(self) -> Self:
        decode = [w for w in self.workers if w.role is Role.DECODE]
        for worker in self.workers if decode and self.schedule_mode is not ScheduleMode.AGGREGATED else ():
            if worker.role is Role.PREFILL and not any(_can_hand_over(worker, other) for other in decode):
                raise ValueError(
                    f"worker {worker.name}: no decode worker has its group {worker.group!r} and its connector"
                    f"{'' if worker.connector is None else f' {worker.connector.value!r}'}, so nobody can take its KV"
                )
        return self

    @model_validator(mode="after")
    def _buckets_name_workers(self) -> Self:
        known = {worker.name for worker in self.workers}
        for number, bucket in enumerate(self.scheduling.length_buckets):
            if unknown := sorted(set(bucket.workers) - known):
                raise ValueError(f"scheduling.length_buckets[{number}].workers: there is no worker {unknown[0]!r}")
        return self


def _can_hand_over(prefill: Worker, decode: Worker) -> bool:
    """As far as both say; what they do not say is asked of them."""
    connectors = {prefill.connector, decode.connector} - {None}
    return prefill.group == decode.group and len(connectors) < 2


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read and validate a YAML config, with what the environment and files of secrets say.

    Raises ConfigError, one line for each fault.
    """
    data = read_yaml(path)
    try:
        data, variables = overridden({} if data is None else data, environment)
        data = with_secrets(_with_tenants(data), SECRETS.__contains__)
    except Unusable as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    return parse(data, str(path), variables)


def _with_tenants(data: Any) -> Any:
    """With the tenants that stand in a file of their own."""
    access = data.get("access") if isinstance(data, dict) else None
    if not isinstance(access, dict) or not isinstance(access.get("tenants_file"), str):
        return data
    named = access["tenants_file"]
    here = access.get("tenants") or {}
    found = read_yaml(Path(named))
    if not isinstance(found, dict) or set(found) != {"tenants"} or not isinstance(found["tenants"], dict):
        raise Unusable(f"access.tenants_file: {named}: must hold 'tenants:' with names below, and nothing else")
    doubled = sorted(map(str, set(here) & set(found["tenants"])))
    if doubled:
        raise Unusable(f"access.tenants_file: {named}: the config has a tenant {doubled[0]}, too")
    return {**data, "access": {**access, "tenants": {**here, **found["tenants"]}}}


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None: nothing. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text") from exc
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {_yaml_fault(exc)}") from exc
    except (ValueError, RecursionError) as exc:  # dates and numbers that there are not, lists without end
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc


def parse(data: Any, source: str, variables: Mapping[Place, str] = {}) -> Config:
    """Validate what a config file holds. `source` stands in front of each fault, or one of the variables."""
    return validated(Config, data, source, variables)


def validated(model: type[AnyModel], data: Any, source: str, variables: Mapping[Place, str] = {}) -> AnyModel:
    """Validate what a file of some kind holds. Raises ConfigError, one line for each fault, as for a config."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping, not {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        faults = [_fault(_origin(source, variables, e["loc"]), e["loc"], e["msg"], e["input"]) for e in exc.errors()]
        raise ConfigError("\n".join(faults)) from exc


def _origin(source: str, variables: Mapping[Place, str], loc: Place) -> str:
    """The file, or the variable from which the value came."""
    return next((name for place, name in variables.items() if loc[: len(place)] == place), source)


SECRETS: Final = frozenset({"api_key", "token", "tokens", "keys", "redis"})
"""Fields whose values are told to nobody, not even where they are wrong."""


def _fault(source: str, loc: tuple[int | str, ...], message: str, value: Any) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    secret = not SECRETS.isdisjoint(loc)
    shown = "" if isinstance(value, dict | list | tuple) or not place or secret else f" (got {value!r})"
    return f"{source}: {place + ': ' if place else ''}{message.removeprefix('Value error, ')}{shown}"


def _yaml_fault(exc: yaml.YAMLError) -> str:
    mark = getattr(exc, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{getattr(exc, 'problem', None) or 'is not YAML'}"


def effective(config: Config) -> str:
    """The whole config with its defaults, as YAML; secrets are not shown."""
    data = _redacted(config.model_dump(mode="json"))
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text


def _redacted(data: Any) -> Any:
    """With stars for secrets; hashes of keys are none."""
    if isinstance(data, list):
        return [_redacted(one) for one in data]
    if not isinstance(data, dict):
        return data
    return {name: _starred(name, value) if name in SECRETS else _redacted(value) for name, value in data.items()}


def _starred(name: str, value: Any) -> Any:
    if name == "redis" and isinstance(value, str):
        return _without_password(value) if "@" in value else value
    if isinstance(value, dict):
        return dict.fromkeys(value, "***")
    return "***" if isinstance(value, str) else value


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
