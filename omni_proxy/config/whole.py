"""The whole config, and what must fit together in it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from omni_proxy.config.access import Access
from omni_proxy.config.discovery import Announcements, Discovery, Replicas
from omni_proxy.config.listen import Admin, Callbacks, Limits, Listen, Timeouts
from omni_proxy.config.models import KvCachePolicy, Model, ScheduleMode, ServedModel
from omni_proxy.config.observing import AccessLog, Tracing
from omni_proxy.config.scheduling import Prewarm, Scheduling
from omni_proxy.config.section import Section
from omni_proxy.config.workers import ConnectorName, Health, Keepalive, Retries, Worker
from omni_proxy.messages import Role


class Config(Section):
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
