"""Which failed legs are tried again, and what the client is told about the others."""

from __future__ import annotations

import pytest

from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.lifecycle.retries import RetryPolicy, Verdict, error_of
from omni_proxy.messages import Failure, FailureKind, Leg
from tests.core.steps import CLOSED, CUT, GARBAGE, REFUSED, SILENT, status

FAIL, OVER, AGAIN = Verdict.FAIL, Verdict.START_OVER, Verdict.DECODE_AGAIN
POLICY = RetryPolicy(max_retries=2)


@pytest.mark.parametrize(
    ("failure", "prefill", "decode_of_prefilled", "decode_reusable", "decode_alone"),
    [
        (REFUSED, OVER, OVER, AGAIN, OVER),
        (CLOSED, FAIL, OVER, OVER, FAIL),
        (CUT, FAIL, FAIL, FAIL, FAIL),
        (SILENT, FAIL, FAIL, FAIL, FAIL),
        (GARBAGE, FAIL, FAIL, FAIL, FAIL),
        (status(400), FAIL, FAIL, FAIL, FAIL),
        (status(429), OVER, OVER, AGAIN, OVER),
        (status(500), FAIL, FAIL, FAIL, FAIL),
        (status(503), OVER, OVER, AGAIN, OVER),
    ],
)
def test_verdicts(
    failure: Failure, prefill: Verdict, decode_of_prefilled: Verdict, decode_reusable: Verdict, decode_alone: Verdict
) -> None:
    assert POLICY.verdict(Leg.PREFILL, failure, 0, prefilled=False) is prefill
    assert POLICY.verdict(Leg.DECODE, failure, 0, prefilled=True) is decode_of_prefilled
    assert POLICY.verdict(Leg.DECODE, failure, 0, prefilled=True, handoff_reusable=True) is decode_reusable
    assert POLICY.verdict(Leg.DECODE, failure, 0, prefilled=False) is decode_alone


@pytest.mark.parametrize(("limit", "retries", "verdict"), [(0, 0, FAIL), (1, 0, OVER), (1, 1, FAIL), (2, 1, OVER)])
def test_all_retries_of_a_request_are_bounded_together(limit: int, retries: int, verdict: Verdict) -> None:
    assert RetryPolicy(limit).verdict(Leg.PREFILL, REFUSED, retries, prefilled=False) is verdict


@pytest.mark.parametrize(
    ("failure", "blamed"),
    [
        (REFUSED, True),
        (CLOSED, True),
        (CUT, True),
        (SILENT, True),
        (GARBAGE, True),
        (status(400), False),
        (status(404), False),
        (status(429), False),
        (status(500), True),
        (status(503), False),
    ],
)
def test_clients_and_busy_engines_are_not_held_against_a_worker(failure: Failure, blamed: bool) -> None:
    assert POLICY.blames_worker(failure) is blamed


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_failure_has_a_code_of_the_gateway(kind: FailureKind) -> None:
    code, detail = error_of(Failure(kind, "x", status=500))
    assert http_status(code) in (502, 504)
    assert code is not ErrorCode.INTERNAL
    assert detail.endswith(".")
