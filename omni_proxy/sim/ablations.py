"""The scheduler with each of its mechanisms off in turn: what each gains on a workload. Pure.

A mechanism that gains nothing anywhere has no place in the scheduler. Those that only an operator switches on (limits,
buckets, tenants, sides) are compared where they are switched on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from omni_proxy.core import CoreSettings
from omni_proxy.scheduler.settings import MECHANISMS, SchedulingSettings

_CHANGES: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    ("order fcfs", {"order": "fcfs"}),
    ("order shortest-uncached", {"order": "shortest-uncached"}),
    ("order omni-nginx", {"order": "omni-nginx"}),
    ("the timeout alone bounds waits", {"ageing": None}),
    ("the late before all", {"starved_share": 1.0}),
    ("nobody starves", {"starvation_timeout_s": 1e9}),
    ("handoff by cost", {"aggregate_below_tokens": None}),
    ("handoff by cost, 50 ms", {"aggregate_below_tokens": None, "tpot_limit_s": 0.05}),
)
_IF_SET: Final[tuple[tuple[str, str, object], ...]] = (
    ("no TPOT limit", "tpot_limit_s", None),
    ("no length buckets", "length_buckets", ()),
    ("no sides", "elastic_roles", False),
    ("no fair shares", "fair_tenants", False),
)
"""Only where the settings ask for them."""


def ablations(settings: CoreSettings) -> Iterator[tuple[str, CoreSettings]]:
    """A name and settings for each mechanism that these settings have, with that one off or another in its place."""
    scheduling = settings.scheduling
    for name, changes in _CHANGES:
        changed = replace(scheduling, **changes)  # type: ignore[arg-type]
        if changed != scheduling:
            yield name, replace(settings, scheduling=changed)
    for name, field, off in _IF_SET:
        changed = replace(scheduling, **{field: off})  # type: ignore[arg-type]
        if changed != scheduling:
            yield name, replace(settings, scheduling=changed)
    for mechanism in MECHANISMS:
        yield f"without {mechanism}", replace(settings, scheduling=_without(scheduling, mechanism))
    if settings.prefix_aware:
        yield "prefixes not followed", replace(settings, prefix_aware=False)


def _without(scheduling: SchedulingSettings, mechanism: str) -> SchedulingSettings:
    return replace(scheduling, without=scheduling.without | {mechanism})
