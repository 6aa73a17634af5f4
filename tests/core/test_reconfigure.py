"""Other settings while requests run."""

from __future__ import annotations

from omni_proxy.core import CoreSettings
from omni_proxy.errors import ErrorCode
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import Arrived, Close, Failure, FailureKind, LegFailed, Mode, StartPrefill
from omni_proxy.scheduler.admission import Admission
from tests.core.steps import core_of, p, spec


def test_limits_and_bounds_hold_from_then_on() -> None:
    core = core_of("p0", "p1", "d0")
    assert [type(e) for e in core.handle(Arrived("a", spec()), 0.0)] == [StartPrefill]
    core.reconfigure(CoreSettings(admission=Admission(0, 0), retries=RetryPolicy(0), max_fails=0))
    failed = Failure(FailureKind.CONNECT, "refused")
    (close,) = core.handle(LegFailed(p("a", 1, "p0"), failed), 1.0)
    assert isinstance(close, Close), "no retries any more"
    assert all(w.usable(1.0) for w in core.workers()), "nobody is ejected any more"
    core.check()


def test_the_wait_for_workers_changes_for_those_who_come_later() -> None:
    core = core_of("p0")
    core.handle(Arrived("a", spec()), 0.0)
    assert core.next_wakeup() == 10.0
    core.reconfigure(CoreSettings(no_worker_timeout_s=1.0))
    core.handle(Arrived("b", spec()), 0.0)
    assert core.next_wakeup() == 1.0


def test_a_full_queue_is_as_full_as_the_new_settings_say() -> None:
    core = core_of("p0")
    core.reconfigure(CoreSettings(admission=Admission(0, 10**6)))
    (close,) = core.handle(Arrived("a", spec()), 0.0)
    assert isinstance(close, Close)
    assert close.error is ErrorCode.QUEUE_FULL


def test_what_shapes_the_core_stays() -> None:
    core = core_of("p0", "d0", "m0", schedule_mode=Mode.AGGREGATED)
    core.reconfigure(CoreSettings(schedule_mode=Mode.SEQUENTIAL))
    (start,) = core.handle(Arrived("a", spec()), 0.0)
    assert type(start).__name__ == "StartDecode"
