"""Codes, statuses, bodies."""

from __future__ import annotations

import msgspec
import pytest

from omni_proxy.errors import ErrorCode, Rejected, error_body, error_type, http_status


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_an_error_status_and_a_type(code: ErrorCode) -> None:
    assert 400 <= http_status(code) < 600
    assert error_type(http_status(code))


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID_JSON, 400, "invalid_request_error"),
        (ErrorCode.MODEL_NOT_FOUND, 404, "not_found_error"),
        (ErrorCode.BODY_TOO_LARGE, 413, "invalid_request_error"),
        (ErrorCode.QUEUE_FULL, 429, "rate_limit_error"),
        (ErrorCode.WORKER_CLOSED, 502, "server_error"),
        (ErrorCode.NO_WORKER, 503, "server_error"),
        (ErrorCode.WORKER_TIMEOUT, 504, "server_error"),
    ],
)
def test_status_and_type(code: ErrorCode, status: int, kind: str) -> None:
    assert (http_status(code), error_type(status)) == (status, kind)


def test_the_body_is_what_openai_clients_expect() -> None:
    body = msgspec.json.decode(msgspec.json.encode(error_body(ErrorCode.INVALID_VALUE, "too many", "n")))
    inner = {"message": "too many", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    assert body == {"error": inner}


def test_a_rejection_says_why() -> None:
    rejected = Rejected(ErrorCode.INVALID_VALUE, "too many", "n")
    assert (rejected.code, rejected.message, rejected.param, str(rejected)) == (
        ErrorCode.INVALID_VALUE,
        "too many",
        "n",
        "too many",
    )
