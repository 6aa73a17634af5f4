"""The gate before the routes that are not hot: an ASGI app around theirs. Small bodies, and keys where asked for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_proxy.access.gate import Gate, shown_key
from omni_proxy.api.http_out import error_json
from omni_proxy.errors import ErrorCode, Rejected, http_status

MAX_BODY_BYTES: Final = 1 << 20
"""None of these routes has a use for more."""
_OPERATORS: Final = ("/metrics", "/omni")
"""Show what all tenants do."""


class Routes:
    """Paths, and paths with all that is below them (`/omni/*`)."""

    def __init__(self, routes: Sequence[str]) -> None:
        self._exact = frozenset(routes)
        self._below = tuple(route[:-1] for route in routes if route.endswith("/*"))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or (bool(self._below) and path.startswith(self._below))


class Guard:
    """Lets requests through to an app, or answers them. All settings can change while it serves."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._routes: Routes | None = None
        self.serves_all = True
        """Is every path served?"""
        self._open = Routes(())
        self._operators_keys: tuple[bytes, ...] = ()

    def use(self, routes: Sequence[str] | None, open_routes: Sequence[str], operators_keys: Iterable[str]) -> None:
        """What is served, what of it needs no key, and the keys (the admin port's tokens) for what operators see."""
        self._routes = None if routes is None else Routes(routes)
        self.serves_all = routes is None
        self._open = Routes(open_routes)
        self._operators_keys = tuple(key.encode() for key in operators_keys)

    def serves(self, path: str) -> bool:
        """Is a path among those that are served?"""
        return self._routes is None or path in self._routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Rejected as exc:
                await _refuse(exc)(scope, receive, send)
                return
            receive = _bounded(receive)
        try:
            await self._app(scope, receive, send)
        except Rejected as exc:
            await _refuse(exc)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path: str = scope["path"]
        if not self.serves(path):
            raise Rejected(ErrorCode.NOT_FOUND, f"There is no route {path}.")
        if any(name == b"content-length" and int(value) > MAX_BODY_BYTES for name, value in scope["headers"]):
            raise _too_large()
        if not self._gate.on or path in self._open:
            return
        shown = shown_key(scope["headers"])
        if any(secrets.compare_digest(shown, key) for key in self._operators_keys):
            return
        if path.startswith(_OPERATORS):
            message = f"{path} is for operators: it needs the admin port's token as 'Authorization: Bearer TOKEN'."
            raise Rejected(ErrorCode.UNAUTHORIZED, message)
        self._gate.who(scope["headers"])


def _bounded(receive: Receive) -> Receive:
    size = 0

    async def counted() -> dict[str, object]:
        nonlocal size
        message = dict(await receive())
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


def _too_large() -> Rejected:
    return Rejected(ErrorCode.BODY_TOO_LARGE, f"The request body is larger than {MAX_BODY_BYTES} bytes.")


def _refuse(exc: Rejected) -> Response:
    close = {"connection": "close"} if exc.code is ErrorCode.BODY_TOO_LARGE else {}
    challenge = {"www-authenticate": "Bearer"} if http_status(exc.code) == 401 else {}
    body = error_json(exc.code, exc.message, exc.param)
    return Response(body, http_status(exc.code), {**close, **challenge}, media_type="application/json")
