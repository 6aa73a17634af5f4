"""Predictions meet reports: counted for each worker, and said aloud where they part for good."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from omni_proxy.apc.divergence import LEAST_REPORTS, WARN_EVERY_S, Divergence
from omni_proxy.apc.feed import FeedCounts, FeedReading
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import (
    Leg,
    Mode,
    Outcome,
    Placement,
    RequestRecord,
    Stage,
    Tokenized,
    WorkerRemoved,
    WorkerUp,
)
from omni_proxy.observe.prefixes import PrefixMetrics
from tests.core.steps import worker


def record(predicted: int | None, reported: int | None, mode: Mode = Mode.SEQUENTIAL) -> RequestRecord:
    return RequestRecord(
        rid="r",
        external_id="r",
        model="m",
        endpoint="chat",
        stream=True,
        mode=mode,
        marks=((Stage.RECEIVED, 0.0, 0),),
        prefill_done_at=None,
        first_token_at=None,
        outcome=Outcome.COMPLETED,
        error=None,
        detail="",
        placements=(Placement("p0", Leg.PREFILL, ""), Placement("d0", Leg.DECODE, "")),
        attempts=2,
        prompt_tokens=1000,
        cached_tokens=reported,
        completion_tokens=1,
        predicted_tokens=predicted,
    )


class Feeds:
    refused = 3

    def readings(self) -> list[FeedReading]:
        return [FeedReading("p0", 1, True, FeedCounts(batches=7, gaps=2), 5)]


def shown(metrics: PrefixMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def ended(metrics: PrefixMetrics, what: RequestRecord, now: float = 0.0) -> None:
    metrics.closed(what, now)


def test_reports_are_counted_for_the_worker_that_computed_the_prompt() -> None:
    core = Core(CoreSettings(prefix_aware=True))
    metrics = PrefixMetrics(lambda: core.caches, Feeds())
    for name in ("p0", "d0"):
        metrics.heard(WorkerUp(worker(name, block_tokens=64)), [])
    metrics.heard(Tokenized("x", None), [])
    ended(metrics, record(512, 512))
    ended(metrics, record(512, 480))
    ended(metrics, record(512, 0))
    ended(metrics, record(0, 512, Mode.AGGREGATED))
    ended(metrics, record(None, 512))
    ended(metrics, record(512, None))
    text = shown(metrics)
    for line in (
        'omni_apc_tokens_total{source="predicted",worker="p0"} 1536.0',
        'omni_apc_tokens_total{source="reported",worker="p0"} 992.0',
        'omni_apc_predictions_total{result="equal",worker="p0"} 2.0',
        'omni_apc_predictions_total{result="below",worker="p0"} 1.0',
        'omni_apc_predictions_total{result="above",worker="d0"} 1.0',
        "omni_apc_unread_prompts_total 1.0",
        "omni_apc_keys 0.0",
        'omni_kv_events_connected{rank="1",worker="p0"} 1.0',
        'omni_kv_events_gaps_total{rank="1",worker="p0"} 2.0',
        'omni_kv_events_unknown_parents_total{rank="1",worker="p0"} 5.0',
        "omni_kv_events_refused_total 3.0",
    ):
        assert line in text.splitlines()
    metrics.heard(WorkerRemoved("p0"), [])
    assert 'worker="p0"} 1536' not in shown(metrics)


def test_a_worker_that_is_wrong_for_good_is_said_aloud_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    metrics = PrefixMetrics(lambda: None, None)
    metrics.heard(WorkerUp(worker("p0")), [])
    with caplog.at_level(logging.WARNING):
        for second in range(int(2 * WARN_EVERY_S)):
            ended(metrics, record(800, 200), float(second))
    assert len(caplog.records) == 2
    assert "p0" in caplog.text
    assert "block size" in caplog.text


def test_one_odd_request_is_no_alarm() -> None:
    divergence = Divergence()
    for number in range(100):
        divergence.compare(800, 0 if number == 50 else 800, 1000, 16)
        assert divergence.warning(float(number)) is None


def test_a_worker_that_reports_nothing_is_told_apart() -> None:
    divergence = Divergence()
    for _ in range(LEAST_REPORTS):
        divergence.compare(800, 0, 1000, 16)
    assert "enable-prompt-tokens-details" in (divergence.warning(0.0) or "")
    assert divergence.warning(1.0) is None
    assert divergence.share == pytest.approx(0.8)
