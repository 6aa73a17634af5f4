"""The admin port: what operators may do, apart from what clients may. An ordinary FastAPI app behind one token.

It is served beside the scheduler, so that there is one for a port however many fronts there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_proxy.api.admin_workers import who
from omni_proxy.api.http_out import error_json
from omni_proxy.api.serving import QuietServer, listening_socket
from omni_proxy.config import Admin
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.messages import Role
from omni_proxy.observe.audit import Audit, digest
from omni_proxy.workers.control import CONTROLS, ControlResult

_OWN_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Controls(Protocol):
    """Who carries operators' calls to workers."""

    async def control(
        self, path: str, query: str, body: bytes, names: Sequence[str], role: Role | None
    ) -> list[ControlResult] | None:
        """Call workers by name, or all of a role, or all; None: a name is nobody's."""
        ...


class TokenGuard:
    """Lets in only who shows a token, noting whose it is, and no page of another site.

    `is_open` names paths that hold no data.
    """

    def __init__(
        self, app: ASGIApp, tokens: Mapping[str, str], is_open: Callable[[str], bool] = lambda _path: False
    ) -> None:
        self._app = app
        self._is_open = is_open
        self._expected = {whose: f"Bearer {token}".encode() for whose, token in tokens.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["method"] == "GET" and self._is_open(scope["path"])):
            headers = dict(scope["headers"])
            whose = self._whose(headers)
            reason = self._refuses(headers, whose)
            if reason is not None:
                await failure(ErrorCode.UNAUTHORIZED, reason)(scope, receive, send)
                return
            if whose is not None:
                scope.setdefault("state", {})["who"] = whose
        await self._app(scope, receive, send)

    def _whose(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Whose token is shown. All are compared: how long that takes tells nothing."""
        shown = headers.get(b"authorization", b"")
        return max((who for who, good in self._expected.items() if secrets.compare_digest(shown, good)), default=None)

    def _refuses(self, headers: Mapping[bytes, bytes], whose: str | None) -> str | None:
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return "This port answers no page of another site."
        if not self._expected:
            # A page of another site could give its name our address; browsers then say that name here.
            host = headers.get(b"host", b"localhost").decode("latin-1")
            name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
            return None if name in _OWN_NAMES else "Without a token this port answers under this machine's names only."
        if whose is None:
            return "This port needs 'Authorization: Bearer' with its token."
        return None


def tokens_of(admin: Admin) -> dict[str, str]:
    """Tokens by whose they are."""
    unnamed = {} if admin.token is None else {digest(admin.token): admin.token}
    return {**admin.tokens, **unnamed}


def create_admin_app(controls: Controls, audit: Audit) -> FastAPI:
    """The app without its guard."""
    app = FastAPI(title="Omni Proxy admin", docs_url=None, redoc_url=None, openapi_url=None)
    for path in sorted(CONTROLS):
        _add_control(app, controls, path, audit)
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Errors in the OpenAI shape."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


def _add_control(app: FastAPI, controls: Controls, path: str, audit: Audit) -> None:
    @app.post(path, summary="Called on every worker, or on those of ?worker= (several) or ?role=")
    async def control(request: Request) -> Response:
        query = [(k, v) for k, v in request.query_params.multi_items() if k not in ("worker", "role")]
        names = request.query_params.getlist("worker")
        role = request.query_params.get("role")
        if role is not None and role not in list(Role):
            return failure(ErrorCode.INVALID_VALUE, f"'role' must be one of {', '.join(Role)}, not {role!r}.", "role")
        passed = str(request.url.replace(query="").include_query_params(**dict(query)).query)
        found = await controls.control(path, passed, await request.body(), names, None if role is None else Role(role))
        if found is None:
            return failure(ErrorCode.NOT_FOUND, f"No worker is called {', '.join(names)}.", "worker")
        good = sum(result.ok for result in found)
        summary = {"total": len(found), "success": good, "failed": len(found) - good}
        called = {"workers": [result.worker for result in found], "query": passed}
        audit.write(*who(request), path, f"{good} of {len(found)} succeeded", None, called)
        return reply({"uri": path, "results": found, "summary": summary}, 200 if good == len(found) else 502)


def reply(value: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def failure(code: ErrorCode, message: str, param: str | None = None) -> Response:
    """An error in the OpenAI shape."""
    return Response(error_json(code, message, param), http_status(code), media_type="application/json")


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        return failure(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed on {request.url.path}.")
    if exc.status_code == 404:
        return failure(ErrorCode.NOT_FOUND, f"There is no route {request.url.path} on this port.")
    return reply({"error": {"message": str(exc.detail)}}, exc.status_code)


async def _validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    name = str(first["loc"][-1])
    return failure(ErrorCode.INVALID_VALUE, f"'{name}' is not valid: {first['msg']}; got {first.get('input')!r}.", name)


class AdminServer:
    """The admin port's socket and server. Raises ConfigError where the port cannot be had."""

    def __init__(self, admin: Admin, app: ASGIApp, is_open: Callable[[str], bool] = lambda _path: False) -> None:
        self._sock: socket.socket = listening_socket(admin.host, admin.port, 128)
        self.port: int = self._sock.getsockname()[1]
        config = uvicorn.Config(
            TokenGuard(app, tokens_of(admin), is_open),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = QuietServer(config)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve for as long as the context lasts."""
        task = asyncio.create_task(self._server.serve([self._sock]), name="admin")
        try:
            yield
        finally:
            self._server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)
            self._sock.close()
