"""Error codes of the gateway, their HTTP status and the OpenAI error body. Pure.

A code is for metrics and programs, the detail is for people. No detail ever carries a worker's address.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from msgspec import Struct


class ErrorCode(StrEnum):
    """What the gateway itself refuses or fails with; a worker's own error passes through unchanged."""

    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    INVALID_HEADER = "invalid_header"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    UNAUTHORIZED = "unauthorized"
    INVALID_API_KEY = "invalid_api_key"
    RATE_LIMITED = "rate_limit_exceeded"
    HEAD_TOO_LARGE = "head_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    WORKER_UNREACHABLE = "worker_unreachable"
    WORKER_CLOSED = "worker_closed"
    WORKER_TIMEOUT = "worker_timeout"
    WORKER_ERROR = "worker_error"
    WORKER_GARBAGE = "worker_garbage"
    HANDOFF_MISSED = "handoff_missed"
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal_error"


def http_status(code: ErrorCode) -> int:
    """The status that a client sees for a code."""
    match code:
        case ErrorCode.INVALID_JSON | ErrorCode.INVALID_VALUE | ErrorCode.INVALID_HEADER:
            return 400
        case ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            return 400
        case ErrorCode.UNAUTHORIZED | ErrorCode.INVALID_API_KEY:
            return 401
        case ErrorCode.MODEL_NOT_FOUND | ErrorCode.NOT_FOUND:
            return 404
        case ErrorCode.METHOD_NOT_ALLOWED:
            return 405
        case ErrorCode.REQUEST_TIMEOUT:
            return 408
        case ErrorCode.BODY_TOO_LARGE:
            return 413
        case ErrorCode.HEAD_TOO_LARGE:
            return 431
        case ErrorCode.QUEUE_FULL | ErrorCode.RATE_LIMITED:
            return 429
        case ErrorCode.CLIENT_GONE:
            return 499
        case ErrorCode.INTERNAL:
            return 500
        case ErrorCode.WORKER_UNREACHABLE | ErrorCode.WORKER_CLOSED | ErrorCode.WORKER_ERROR:
            return 502
        case ErrorCode.WORKER_GARBAGE | ErrorCode.HANDOFF_MISSED:
            return 502
        case ErrorCode.NO_WORKER | ErrorCode.QUEUE_TIMEOUT | ErrorCode.DRAINING:
            return 503
        case ErrorCode.WORKER_TIMEOUT:
            return 504
        case _:
            assert_never(code)


def error_type(status: int) -> str:
    """The `type` that OpenAI clients expect beside a status."""
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


class ErrorDetail(Struct, frozen=True):
    """The inner object of an OpenAI error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    """An OpenAI error body, to be encoded as JSON."""

    error: ErrorDetail


class Rejected(Exception):
    """The client's fault: raised at the edge, answered at once, never seen by the core."""

    def __init__(
        self, code: ErrorCode, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = b"www-authenticate: Bearer\r\n" if http_status(code) == 401 else b""
        """Further header lines of the answer."""


class Refusal(Struct, frozen=True):
    """Admission's no: what to answer and when to come back."""

    code: ErrorCode
    detail: str
    retry_after_s: float | None = None


def error_body(code: ErrorCode, message: str, param: str | None = None) -> ErrorBody:
    """The OpenAI error object for a code."""
    status = http_status(code)
    return ErrorBody(ErrorDetail(message, error_type(status), param, code.value))
