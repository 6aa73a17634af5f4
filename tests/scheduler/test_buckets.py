"""Preferred workers by prompt length, and overflow."""

from __future__ import annotations

import pytest

from omni_proxy.config import ConfigError, parse
from omni_proxy.messages import Arrived, StartPrefill, Tick, WorkerDown
from omni_proxy.scheduler.buckets import Buckets
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings
from tests.core.steps import core_of, spec, worker

ROWS = (LengthBucket(1000, ("p0", "p1")), LengthBucket(None, ("p2",)))


@pytest.mark.parametrize(
    ("tokens", "names", "away"),
    [
        (1, "p0 p1 p2", [0, 0, 2]),
        (1000, "p0 p1 p2", [0, 0, 2]),
        (1001, "p0 p1 p2", [2, 2, 0]),
        (1001, "p0 p1", None),
        (1, "p0@0 p0@1 p2", [0, 0, 2]),
        (1, "p0 p1", None),
        (1, "d0 d1", None),
    ],
)
def test_who_is_away_from_home(tokens: int, names: str, away: list[float] | None) -> None:
    ledger = Ledger()
    workers = [ledger.put(worker(name)) for name in names.split()]
    assert Buckets(ROWS, 2.0).away_s(tokens, workers) == away


def test_lengths_above_the_last_bucket_go_anywhere() -> None:
    ledger = Ledger()
    assert Buckets(ROWS[:1], 2.0).away_s(1001, [ledger.put(worker("p0")), ledger.put(worker("p2"))]) is None


def test_prompts_stay_in_their_bucket_until_another_is_better_by_the_overflow() -> None:
    settings = SchedulingSettings(length_buckets=ROWS, overflow_s=0.5)
    core = core_of("p0", "p1", "p2", "d0", scheduling=settings)
    sent = []
    for number in range(10):
        for effect in core.handle(Arrived(f"r{number}", spec(900)), 0.0):
            if isinstance(effect, StartPrefill):
                sent.append(effect.lease.worker)
    assert set(sent) == {"p0", "p1"}, "the others wait for them: p2 is not better by half a second"
    effects = core.handle(Arrived("long", spec(30_000)), 0.0) + core.handle(Tick(), 0.0)
    (start,) = [e for e in effects if isinstance(e, StartPrefill)]
    assert start.lease.worker == "p2"


def test_a_bucket_without_workers_is_served_by_the_others() -> None:
    core = core_of("p0", "p1", "p2", "d0", scheduling=SchedulingSettings(length_buckets=ROWS))
    core.handle(WorkerDown("p2", "died"), 0.0)
    (start,) = [e for e in core.handle(Arrived("long", spec(30_000)), 0.0) if isinstance(e, StartPrefill)]
    assert start.lease.worker in ("p0", "p1")


@pytest.mark.parametrize(
    ("buckets", "fault"),
    [
        ([{"workers": ["p0"]}, {"up_to_tokens": 5, "workers": ["p0"]}], "only the last one may be without"),
        ([{"up_to_tokens": 5, "workers": ["p0"]}, {"up_to_tokens": 5, "workers": ["p0"]}], "must rise"),
        ([{"up_to_tokens": 9, "workers": ["p0"]}, {"up_to_tokens": 5, "workers": ["p0"]}], r"not \[9, 5\]"),
        ([{"up_to_tokens": 5, "workers": ["x"]}], r"length_buckets\[0\].workers: there is no worker 'x'"),
        ([{"up_to_tokens": 5, "workers": []}], "at least 1 item"),
        ([{"up_to_tokens": 0, "workers": ["p0"]}], r"length_buckets\[0\].up_to_tokens"),
    ],
)
def test_faults(buckets: list[dict[str, object]], fault: str) -> None:
    workers = [{"name": "p0", "url": "http://a:1", "role": "prefill"}]
    with pytest.raises(ConfigError, match=fault) as raised:
        parse({"workers": workers, "scheduling": {"length_buckets": buckets}}, "omni.yaml")
    assert "\n" not in str(raised.value)
