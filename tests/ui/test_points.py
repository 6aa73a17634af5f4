"""From ended requests to points: what counts as good, percentiles, steps, and many requests at once."""

from __future__ import annotations

from typing import Any

import pytest

from omni_proxy.messages import Mode, Outcome, RequestRecord, Stage
from omni_proxy.ui.points import MOST_RECORDS, Limits, history, is_good, percentile, point, tpot_s

LIMITS = Limits(1.0, 0.1)


def record(
    begin: float = 0.0, first: float | None = 0.5, end: float = 1.5, tokens: int = 11, **fields: Any
) -> RequestRecord:
    usual: dict[str, Any] = {
        "rid": "r", "external_id": "e", "model": "m", "endpoint": "/v1/chat/completions", "stream": True,
        "mode": Mode.SEQUENTIAL, "marks": ((Stage.RECEIVED, begin, 1), (Stage.FINISHED, begin + end, 1)),
        "prefill_done_at": None, "first_token_at": None if first is None else begin + first,
        "outcome": Outcome.COMPLETED, "error": None, "detail": "", "placements": (), "attempts": 2,
        "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": tokens,
    }  # fmt: skip
    return RequestRecord(**(usual | fields))


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"first": 1.0, "end": 2.0}, True),
        ({"first": 1.01, "end": 2.0}, False),
        ({"end": 1.6}, False),
        ({"tokens": 1, "end": 50.0}, True),
        ({"first": None, "end": 2.0}, True),
        ({"first": None, "end": 2.01}, False),
        ({"outcome": Outcome.FAILED}, False),
        ({"outcome": Outcome.CANCELLED}, False),
    ],
)
def test_an_answer_is_good_within_both_limits(fields: dict[str, Any], good: bool) -> None:
    assert is_good(record(**fields), LIMITS) is good


def test_time_per_token_needs_two_tokens_and_a_stream() -> None:
    assert tpot_s(record()) == pytest.approx(0.1)
    assert tpot_s(record(tokens=1)) is None
    assert tpot_s(record(first=None)) is None
    assert tpot_s(record(completion_tokens=None)) is None


def test_percentiles_are_values_that_were_there() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.01, 0.25, 0.5, 0.75, 0.95, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert percentile([], 0.5) is None


def test_a_point_counts_each_outcome_once() -> None:
    ended = [record(), record(end=9.0), record(outcome=Outcome.FAILED), record(outcome=Outcome.CANCELLED)]
    got = point(ended, 7.0, 2.0, LIMITS, 5)
    assert (got.ended, got.completed, got.good, got.failed, got.waiting) == (4, 2, 1, 1, 5)
    assert (got.prompt_tokens, got.cached_tokens, got.generated_tokens) == (200, 80, 22)
    empty = point([], 7.0, 2.0, LIMITS)
    assert (empty.ended, empty.good, empty.ttft_p50_s, empty.waiting) == (0, 0, None, None)


def test_more_cached_than_asked_is_not_believed() -> None:
    assert point([record(cached_tokens=500)], 0.0, 2.0, LIMITS).cached_tokens == 100


def test_of_very_many_some_stand_for_all() -> None:
    many = [record(end=1.5 if n % 4 else 9.0) for n in range(7 * MOST_RECORDS)]
    got = point(many, 0.0, 2.0, LIMITS)
    assert got.ended == len(many)
    assert got.completed == len(many)
    assert got.good == pytest.approx(len(many) * 0.75, rel=0.02)
    assert got.prompt_tokens == pytest.approx(100 * len(many), rel=0.01)


def test_history_has_a_point_for_each_step_that_is_over() -> None:
    ends = [3.9, 4.0, 5.9, 9.99, 10.5]
    newest_first = [record(begin=end - 1.5) for end in reversed(ends)]
    points = history(newest_first, 10.7, 1000.0, 2.0, 4, LIMITS)
    assert [(p.at, p.ended) for p in points] == [(1004.0, 1), (1006.0, 2), (1008.0, 0), (1010.0, 1)]
    # Asked later, the same steps are the same.
    assert history(newest_first, 11.9, 1000.0, 2.0, 4, LIMITS) == points
    assert history([], 0.5, 0.0, 2.0, 3, LIMITS)[0].at == -4.0
