"""What an operator may set about the core's decisions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import Mode
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What an operator may set; seconds and tokens as the names say."""

    schedule_mode: Mode | None = None
    """None: what the members can do, sequential before parallel before aggregated."""
    prefix_aware: bool = False
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    queue_timeout_s: float = 60.0
    no_worker_timeout_s: float = 10.0
    admission: Admission = field(default_factory=Admission)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    max_fails: int = 1
    fail_timeout_s: float = 10.0
    prewarm: PrewarmSettings | None = None
    """None: nothing is computed ahead."""
    seed: int = 0
    """Of the choices between equals where there are other gateways."""


def fields_of(settings: CoreSettings) -> dict[str, object]:
    """Settings as plain values, as event logs and events hold them."""
    fields: dict[str, object] = msgspec.to_builtins(settings)
    return fields


def settings_from(fields: Mapping[str, Any]) -> CoreSettings:
    """Settings from plain values. Raises TypeError and ValueError.

    Built by name: where this is compiled its dataclasses do not tell the types of their fields.
    """
    return CoreSettings(**{name: _SETTING.get(name, _as_it_is)(value) for name, value in fields.items()})


def _as_it_is(value: Any) -> Any:
    return value


def _scheduling(fields: Mapping[str, Any]) -> SchedulingSettings:
    buckets = tuple(LengthBucket(b["up_to_tokens"], tuple(b["workers"])) for b in fields.get("length_buckets", ()))
    left_out = frozenset(fields.get("without", ()))
    return SchedulingSettings(**{**fields, "length_buckets": buckets, "without": left_out})


_SETTING: Final[Mapping[str, Callable[[Any], Any]]] = {
    "schedule_mode": lambda value: None if value is None else Mode(value),
    "scheduling": _scheduling,
    "admission": lambda value: Admission(**value),
    "prewarm": lambda value: None if value is None else PrewarmSettings(**value),
    "retries": lambda value: RetryPolicy(**value),
}
"""How a setting is made again from plain values."""
