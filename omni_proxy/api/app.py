"""Every route that is not hot: models, health, metrics, timelines. An ordinary FastAPI app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException

from omni_proxy import __version__
from omni_proxy.api.http_out import error_json
from omni_proxy.call import HOT_PATHS
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.messages import RequestRecord
from omni_proxy.observe.chrome_trace import chrome_trace
from omni_proxy.observe.expert_loads import ExpertLoad
from omni_proxy.observe.experts import experts_json
from omni_proxy.observe.explain import explain
from omni_proxy.observe.timelines import summary, timeline
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.regression import Regression
from omni_proxy.workers.discovery.finder import SourceState
from omni_proxy.workers.discovery.vetting import Refused


class _ModelId(msgspec.Struct):
    id: str


class View(Protocol):
    """What the app may ask of the gateway."""

    def ready(self) -> bool: ...
    def now(self) -> float: ...
    def wall_offset(self) -> float: ...
    def models(self) -> list[bytes]: ...
    def workers(self) -> list[WorkerLoad]: ...
    def discovery(self) -> tuple[list[SourceState], list[Refused]]: ...
    def experts(self) -> list[ExpertLoad]: ...
    def find(self, request_id: str) -> RequestRecord | None: ...
    def live(self) -> list[RequestRecord]: ...
    def last(self, count: int) -> list[RequestRecord]: ...


def create_app(view: View, registry: CollectorRegistry, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """The app over one gateway's view."""
    app = FastAPI(title="Omni Proxy", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    _add_serving_routes(app, view, registry)
    _add_inspection_routes(app, view)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


def _add_serving_routes(app: FastAPI, view: View, registry: CollectorRegistry) -> None:
    @app.get("/v1/models", summary="The models that can be served now")
    async def models() -> Response:
        return _json(b'{"object":"list","data":[%b]}' % b",".join(view.models()))

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: str) -> Response:
        found = next((raw for raw in view.models() if msgspec.json.decode(raw, type=_ModelId).id == name), None)
        if found is None:
            return _error(ErrorCode.MODEL_NOT_FOUND, f"The model {name!r} does not exist.", "model")
        return _json(found)

    @app.get("/health", summary="200 while the gateway lives")
    async def health() -> Response:
        return _json(b'{"status":"ok"}')

    @app.get("/ready", summary="200 when a model can be served from end to end")
    async def ready() -> Response:
        if view.ready():
            return _json(b'{"status":"ready"}')
        return _error(ErrorCode.NO_WORKER, "No model can be served: a prefill or a decode worker is missing.")

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)


def _add_inspection_routes(app: FastAPI, view: View) -> None:
    @app.get("/omni/requests", summary="The live requests and the last ended ones, newest first")
    async def requests(limit: int = 50) -> Response:
        now, offset = view.now(), view.wall_offset()
        live = [summary(r, now, offset) for r in view.live()]
        ended = [summary(r, now, offset) for r in view.last(max(0, min(limit, 1000)))]
        return _json(msgspec.json.encode({"live": live, "ended": ended}))

    @app.get("/omni/trace.json", summary="Timelines for chrome://tracing and Perfetto; one request's with ?id=")
    async def trace(limit: int = 200, id: str | None = None) -> Response:
        if id is not None:
            record = view.find(id)
            if record is None:
                return _error(ErrorCode.NOT_FOUND, f"No request {id!r} is known (any more).", "id")
            records = [record]
        else:
            records = [*view.live(), *view.last(max(0, min(limit, 10_000)))]
        return _json(msgspec.json.encode(chrome_trace(records, view.now(), view.wall_offset())))

    @app.get("/omni/requests/{request_id}", summary="One request's timeline")
    async def request(request_id: str) -> Response:
        record = view.find(request_id)
        if record is None:
            return _error(ErrorCode.NOT_FOUND, f"No request {request_id!r} is known (any more).", "request_id")
        return _json(msgspec.json.encode(timeline(record, view.now(), view.wall_offset())))

    @app.get("/omni/requests/{request_id}/explain", summary="Why it took so long, and what would have made it faster")
    async def explained(request_id: str) -> Response:
        record = view.find(request_id)
        if record is None:
            return _error(ErrorCode.NOT_FOUND, f"No request {request_id!r} is known (any more).", "request_id")
        return _json(msgspec.json.encode(explain(record, view.now())))

    @app.get("/omni/workers", summary="The workers and what they hold")
    async def workers() -> Response:
        found: dict[str, object] = {"workers": [worker_json(w, view.now()) for w in view.workers()]}
        sources, refused = view.discovery()
        if sources:
            found |= {"sources": sources, "refused": refused}
        return _json(msgspec.json.encode(found))

    @app.get("/omni/experts", summary="How the experts of each worker that counts them are loaded")
    async def experts() -> Response:
        return _json(msgspec.json.encode(experts_json(view.experts(), view.wall_offset())))


def worker_json(worker: WorkerLoad, now: float) -> dict[str, object]:
    """A worker and what it holds, as JSON shows it."""
    spec = worker.spec
    state = "draining" if worker.draining else "up" if worker.up else "down"
    return {
        "name": spec.name,
        "role": spec.role,
        "current_role": worker.role,
        "turns_to": worker.turns_to,
        "state": "ejected" if state == "up" and now < worker.ejected_until else state,
        "reason": worker.reason or None,
        "models": spec.models,
        "endpoint": spec.endpoint or None,
        "engine": spec.engine or None,
        "connector": spec.connector or None,
        "group": spec.group or None,
        "backup": spec.backup,
        "max_model_len": spec.max_model_len,
        "block_tokens": spec.block_tokens,
        "kv_capacity_tokens": spec.kv_capacity_tokens,
        "sequences": worker.seqs,
        "max_sequences": worker.max_seqs,
        "prefill_tokens": worker.prefill_tokens,
        "kv_tokens": worker.kv_tokens,
        "stranded_kv_tokens": worker.stranded_tokens,
        "prefill_free_s": round(worker.backlog.free_at(now) - now, 3),
        "prefill_cost": _fit(worker.backlog.cost.fit, ("prompt_s", "token_s", "pair_s")),
        "decode_cost": _fit(worker.decoding.cost.fit, ("step_s", "sequence_s", "kv_token_s")),
    }


def _fit(fit: Regression, names: tuple[str, str, str]) -> dict[str, object]:
    """What was learned of a worker's speed; `error` is the usual distance from it, as a share."""
    weights = dict(zip(names, fit.weights, strict=True))
    return {
        **weights,
        "error": round(fit.error, 4),
        "observations": fit.observations,
        "rejected": fit.rejected,
    }


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")


def _error(code: ErrorCode, message: str, param: str | None = None) -> Response:
    return _json(error_json(code, message, param), http_status(code))


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405 or request.url.path in HOT_PATHS:
        error = _error(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed on {request.url.path}.")
        error.headers["allow"] = "POST" if request.url.path in HOT_PATHS else (exc.headers or {}).get("allow", "GET")
        return error
    if exc.status_code == 404:
        return _error(ErrorCode.NOT_FOUND, f"There is no route {request.url.path}.")
    return _json(error_json(ErrorCode.INVALID_VALUE, str(exc.detail)), exc.status_code)


async def _validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    name = str(first["loc"][-1])
    message = f"'{name}' is not valid: {first['msg']}; got {first.get('input')!r}."
    return _error(ErrorCode.INVALID_VALUE, message, name)
