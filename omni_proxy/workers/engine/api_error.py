"""A refusal in the shape that OpenAI clients read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

ABANDONED: Final = "abandoned"
"""The `type` by which a gateway tells this 503 from one that says "not now": KV that it was handed is spent."""
_ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A refusal that a client may read: an HTTP status, a sentence, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str | None = None) -> None:
        """`kind`: the error's `type`; by default, the usual one of its status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or _ERROR_TYPES.get(status, "Error")

    def body(self) -> dict[str, Any]:
        """The error in the shape that vLLM and OpenAI clients expect."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


def abandoned(message: str) -> ApiError:
    """A 503 for a request that had begun: it is to be started over elsewhere, from its prompt."""
    return ApiError(503, message, kind=ABANDONED)


def bad_value(param: str, value: object, rule: str) -> ApiError:
    """A 400 that names the field, what it held (shortened) and what it must be."""
    return ApiError(400, f"{param}: got {shorten(value)}, {rule}", param)


def shorten(value: object, limit: int = 80) -> str:
    """The value as JSON, cut to `limit` characters, so that an error never repeats a whole prompt."""
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, list | dict) and len(value) > limit:
        return f"a {type(value).__name__} of {len(value)} items"
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= limit else text[:limit] + "…"
