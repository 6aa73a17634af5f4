"""Routes by which operators change the workers and have the config loaded again; every call leaves an audit line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from omni_proxy.api.http_out import error_json
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.messages import Role
from omni_proxy.observe.audit import Audit
from omni_proxy.workers.operations import NoSuchWorker, NotPossible, Operations, Outcome, fault_of

_MOST_BYTES: Final = 64 << 10


class Reloading(Protocol):
    """Who loads the config again."""

    async def reload(self) -> tuple[bool, int] | None:
        """Is another config in force now, and the how-manieth is in force; None: there was no answer in time."""
        ...


class _Wrong(Exception):
    """A body that cannot be used."""

    def __init__(self, message: str, param: str | None = None, code: ErrorCode = ErrorCode.INVALID_VALUE) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def add_worker_routes(app: FastAPI, operations: Operations, reloading: Reloading, audit: Audit) -> None:
    """All of them."""
    done = _Audited(audit)

    @app.get("/omni/workers", summary="Every worker with its source and what is ordered about it")
    async def workers() -> Response:
        return _json({"workers": operations.known()})

    @app.post("/omni/workers", summary="Add a worker; fields as in the config")
    async def add(request: Request) -> Response:
        return await done(request, "add", None, lambda body: operations.add(body))

    @app.delete("/omni/workers/{name:path}", summary="Drain a worker, then forget it")
    async def remove(request: Request, name: str) -> Response:
        return await done(request, "remove", name, lambda _: operations.remove(name))

    @app.post("/omni/workers/{name:path}/drain", summary="No new work for a worker; what it has ends")
    async def drain(request: Request, name: str) -> Response:
        return await done(request, "drain", name, lambda _: operations.drain(_whole(name)))

    @app.post("/omni/workers/{name:path}/undrain", summary="Use it again as soon as it answers")
    async def undrain(request: Request, name: str) -> Response:
        return await done(request, "undrain", name, lambda _: operations.undrain(_whole(name)))

    @app.put("/omni/workers/{name:path}/weight", summary='{"weight": 2.0}; null: as its source says')
    async def weight(request: Request, name: str) -> Response:
        return await done(request, "weight", name, lambda body: operations.weigh(name, _weight(body)))

    @app.put("/omni/workers/{name:path}/role", summary='{"role": "decode"}; null: as its source says')
    async def role(request: Request, name: str) -> Response:
        return await done(request, "role", name, lambda body: operations.give_role(name, _role(body)))

    @app.post("/omni/reload", summary="Load the config file again")
    async def reload(request: Request) -> Response:
        found = await reloading.reload()
        good = found is not None and found[0]
        outcome = "loaded" if good else "no answer in time" if found is None else "refused"
        audit.write(*who(request), "reload", outcome)
        if found is None:
            return _error(ErrorCode.INTERNAL, "The config was not loaded again in time.")
        if not found[0]:
            return _error(ErrorCode.INVALID_VALUE, "The config file has a fault, the old one stays; see the log.")
        return _json({"action": "reload", "generation": found[1]})


class _Audited:
    """Carries one action out, and leaves its line."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def __call__(
        self, request: Request, action: str, worker: str | None, do: Callable[[Any], Awaitable[Outcome]]
    ) -> Response:
        body: Any = None
        shared: bool | None = None
        try:
            body = await _body(request)
            outcome = await do(body)
            answer, said, shared = _json(outcome), "changed" if outcome.changed else "unchanged", outcome.shared
            worker = outcome.worker
        except NoSuchWorker:
            said = f"No worker is called {worker}."
            answer = _error(ErrorCode.NOT_FOUND, said, "worker")
        except NotPossible as exc:
            said = f"Not possible: {exc}."
            answer = _error(ErrorCode.INVALID_VALUE, said)
        except ValidationError as exc:
            param, said = fault_of(exc)
            answer = _error(ErrorCode.INVALID_VALUE, said, param)
        except _Wrong as exc:
            said = str(exc)
            answer = _error(exc.code, said, exc.param)
        self._audit.write(*who(request), action, said, worker, _without_secrets(body), shared)
        return answer


def _whole(name: str) -> str:
    """The worker behind the name of one of its data-parallel ranks."""
    return name.partition("@")[0]


def who(request: Request) -> tuple[str, str]:
    """Whose token was shown, and from where."""
    client = request.client
    return getattr(request.state, "who", "anybody"), "" if client is None else f"{client.host}:{client.port}"


def _without_secrets(body: Any) -> Any:
    return {k: "***" if k == "api_key" else v for k, v in body.items()} if body and isinstance(body, dict) else None


async def _body(request: Request) -> Any:
    if request.method in ("DELETE",) or request.url.path.endswith(("/drain", "/undrain")):
        return None
    raw = await request.body()
    if len(raw) > _MOST_BYTES:
        raise _Wrong(f"The body has {len(raw)} bytes; {_MOST_BYTES} are allowed.", code=ErrorCode.BODY_TOO_LARGE)
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as exc:
        raise _Wrong(f"The body is not JSON: {exc}.", code=ErrorCode.INVALID_JSON) from exc
    if not isinstance(body, dict):
        raise _Wrong("The body must be a JSON object.")
    return body


def _only(body: dict[str, Any], name: str) -> Any:
    if set(body) != {name}:
        raise _Wrong(f"The body must hold '{name}' and nothing else, not {', '.join(sorted(body)) or 'nothing'}.", name)
    return body[name]


def _weight(body: dict[str, Any]) -> float | None:
    value = _only(body, "weight")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6):
        raise _Wrong(f"'weight' must be a number above 0, at most 1e6, or null; got {value!r}.", "weight")
    return value


def _role(body: dict[str, Any]) -> Role | None:
    value = _only(body, "role")
    if value is not None and value not in list(Role):
        raise _Wrong(f"'role' must be one of {', '.join(Role)}, or null; got {value!r}.", "role")
    return None if value is None else Role(value)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(code: ErrorCode, message: str, param: str | None = None) -> Response:
    return Response(error_json(code, message, param), http_status(code), media_type="application/json")
