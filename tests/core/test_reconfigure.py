"""Other settings while requests run."""

from __future__ import annotations

import msgspec
import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.errors import ErrorCode
from omni_proxy.flow.settings import fields_of, settings_from
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import (
    Arrived,
    Close,
    Effect,
    Failure,
    FailureKind,
    LegFailed,
    Mode,
    PrefillDone,
    Reconfigured,
    StartDecode,
    StartPrefill,
)
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings
from tests.core.steps import core_of, p, spec, worker


def reconfigure(core: Core, settings: CoreSettings, now: float = 0.0) -> list[Effect]:
    effects = core.handle(Reconfigured(fields_of(settings)), now)
    core.check()
    return effects


def test_limits_and_bounds_hold_from_then_on() -> None:
    core = core_of("p0", "p1", "d0")
    assert [type(e) for e in core.handle(Arrived("a", spec()), 0.0)] == [StartPrefill]
    reconfigure(core, CoreSettings(admission=Admission(0, 0), retries=RetryPolicy(0), max_fails=0))
    failed = Failure(FailureKind.CONNECT, "refused")
    (close,) = core.handle(LegFailed(p("a", 1, "p0"), failed), 1.0)
    assert isinstance(close, Close), "no retries any more"
    assert all(w.usable(1.0) for w in core.workers()), "nobody is ejected any more"
    core.check()


def test_the_wait_for_workers_changes_for_those_who_come_later() -> None:
    core = core_of("p0")
    core.handle(Arrived("a", spec()), 0.0)
    assert core.next_wakeup() == 10.0
    reconfigure(core, CoreSettings(no_worker_timeout_s=1.0))
    core.handle(Arrived("b", spec()), 0.0)
    assert core.next_wakeup() == 1.0


def test_a_full_queue_is_as_full_as_the_new_settings_say() -> None:
    core = core_of("p0")
    reconfigure(core, CoreSettings(admission=Admission(0, 10**6)))
    (close,) = core.handle(Arrived("a", spec()), 0.0)
    assert isinstance(close, Close)
    assert close.error is ErrorCode.QUEUE_FULL


def test_what_shapes_the_core_stays() -> None:
    core = core_of("p0", "d0", "m0", schedule_mode=Mode.AGGREGATED)
    reconfigure(core, CoreSettings(schedule_mode=Mode.SEQUENTIAL))
    (start,) = core.handle(Arrived("a", spec()), 0.0)
    assert type(start).__name__ == "StartDecode"


def test_another_order_holds_for_those_who_wait() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0", scheduling=SchedulingSettings(order="fcfs"))
    for rid, tokens in (("a", 100), ("b", 5000), ("c", 50)):
        core.handle(Arrived(rid, spec(tokens)), 0.0)
    assert reconfigure(core, CoreSettings(scheduling=SchedulingSettings(order="shortest-uncached"))) == []
    effects = core.handle(PrefillDone(p("a", 1, "p0"), handoff=True), 1.0)
    assert [e.lease.rid for e in effects if isinstance(e, StartPrefill)] == ["c"]


def test_who_may_go_by_the_new_settings_goes_at_once() -> None:
    core = core_of("p0", "d0", scheduling=SchedulingSettings(tpot_limits_s={1: 1e-4}))
    for rid, priority in (("a", 0), ("b", 1)):
        core.handle(Arrived(rid, spec(priority=priority)), 0.0)
        core.handle(PrefillDone(p(rid, 1, "p0"), handoff=True), 0.1)
    assert core.waiting()[0] == 1, "the steps of two answers would take too long"
    (start,) = reconfigure(core, CoreSettings(), 0.2)
    assert isinstance(start, StartDecode)


@pytest.mark.parametrize(
    "settings",
    [
        CoreSettings(),
        CoreSettings(
            schedule_mode=Mode.PARALLEL,
            scheduling=SchedulingSettings(
                tenant_weights={"a": 2.0},
                ttft_targets_s={-1: 0.5},
                length_buckets=(LengthBucket(100, ("p0",)), LengthBucket(None, ("p1",))),
                aggregate_below_tokens=None,
            ),
            admission=Admission(1, 2),
            retries=RetryPolicy(3),
        ),
    ],
)
def test_settings_come_back_from_plain_values(settings: CoreSettings) -> None:
    encoded = msgspec.msgpack.encode(Reconfigured(fields_of(settings)))
    assert settings_from(msgspec.msgpack.decode(encoded, type=Reconfigured).settings) == settings
