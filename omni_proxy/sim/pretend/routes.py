"""The routes of a pretending worker: those of vLLM that gateways ask, and a few that SGLang's router looks at."""

from __future__ import annotations

import logging
import uuid
from typing import Any, Final

import msgspec

from omni_proxy import __version__
from omni_proxy.sim.http.server import Incoming
from omni_proxy.sim.pretend.calls import RENDER, rendered
from omni_proxy.sim.pretend.peers import RELEASE_PATH, ROOM_PATH
from omni_proxy.sim.pretend.worker import GENERATING, PretendWorker
from omni_proxy.workers.engine.openai_api import ApiError, ReleaseRequest, parse_body

logger = logging.getLogger(__name__)

METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


SCALE_OUT_PATH: Final = "/omni/pretend/scale_out"
"""Switches rendering on and off, for comparing gateways over the same workers."""


class _ScaleOut(msgspec.Struct):
    enabled: bool


class Routes:
    """Answers whatever comes in on one worker's ports."""

    def __init__(self, worker: PretendWorker, started: int) -> None:
        self._worker = worker
        self._started = started
        self._scale_out = worker.options.scale_out

    def __call__(self, incoming: Incoming) -> None:
        try:
            self._route(incoming)
        except ApiError as exc:
            incoming.reply.send(exc.status, msgspec.json.encode(exc.body()))
        except Exception:  # our fault: the client learns that it happened, the log learns what
            logger.exception("%s %s failed", incoming.method, incoming.path)
            incoming.reply.send(500, msgspec.json.encode(ApiError(500, "internal error of the worker").body()))

    def _route(self, incoming: Incoming) -> None:
        if incoming.too_large:
            raise ApiError(413, "the body is too large")
        method, path = incoming.method, incoming.path
        if method == "POST":
            if path in GENERATING:
                self._worker.generate(incoming)
                return
            if path.removesuffix(RENDER) in GENERATING:
                if not self._scale_out:
                    raise ApiError(403, "the worker was started without --enable-scale-out")
                return self._json(incoming, rendered(path, incoming.body, uuid.uuid4().hex, self._worker.options))
            if path == RELEASE_PATH:
                body = parse_body(incoming.body, ReleaseRequest)
                return self._json(incoming, {"released": self._worker.release(body.request_id)})
            if path == SCALE_OUT_PATH:
                self._scale_out = parse_body(incoming.body, _ScaleOut).enabled
                return self._json(incoming, {"enabled": self._scale_out})
            if path == "/reset_prefix_cache":
                return self._json(incoming, {"success": self._worker.reset_cache()})
        elif method == "GET":
            return self._get(incoming, path)
        raise ApiError(404 if method in ("GET", "POST") else 405, f"{method} {path}: Not Found")

    def _get(self, incoming: Incoming, path: str) -> None:
        worker = self._worker
        if path == "/metrics":
            return incoming.reply.send(200, worker.metrics.exposition(), METRICS_TYPE)
        if path.startswith(ROOM_PATH):
            return self._room(incoming, path)
        if path == "/health":
            if worker.draining:
                raise ApiError(503, "the worker is shutting down")
            return incoming.reply.send(200, b"")
        found = self._facts().get(path)
        if found is None:
            raise ApiError(404, f"GET {path}: Not Found")
        self._json(incoming, found)

    def _facts(self) -> dict[str, Any]:
        options = self._worker.options
        names, longest = options.served_model_name, options.model.max_model_len
        card = {"object": "model", "created": self._started, "owned_by": "omni-proxy", "max_model_len": longest}
        cards = [{"id": name, **card, "root": name, "parent": None} for name in names]
        server = {
            "model_path": names[0],
            "served_model_name": names[0],
            "tp_size": 1,
            "dp_size": 1,
            "version": __version__,
            "max_total_num_tokens": options.model.kv_capacity_tokens,
        }
        model = {"model_path": names[0], "tokenizer_path": names[0], "is_generation": True}
        return {
            "/v1/models": {"object": "list", "data": cards},
            "/version": {"version": __version__},
            "/kv_event_sources": self._worker.kv_event_sources(),
            "/load": {"server_load": self._worker.busy()},
            "/get_server_info": server,
            "/server_info": server,
            "/get_model_info": model,
            "/model_info": model,
        }

    def _room(self, incoming: Incoming, path: str) -> None:
        text = path.removeprefix(ROOM_PATH)
        if not text.isascii() or not text.isdigit():
            raise ApiError(400, f"{path}: the room must be a number")
        room, reply = int(text), incoming.reply
        reply.on_gone = lambda: self._worker.holds.forget(room)
        self._worker.holds.ask(room, lambda name: reply.send(200, msgspec.json.encode(name)))

    def _json(self, incoming: Incoming, body: object) -> None:
        incoming.reply.send(200, msgspec.json.encode(body))
