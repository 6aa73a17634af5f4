"""Asks one worker whether it lives and what it is, on the routes that engines have for that. Knows nothing of requests.

Probes never share a connection with requests. Whether it lives is asked often, and cheaply; the rest with httpx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import httpx
import msgspec

from omni_proxy.tls import ClientFiles, ClientTls, TlsError
from omni_proxy.workers.facts import (
    Facts,
    joined,
    of_bootstrap,
    of_metrics,
    of_models,
    of_other,
    of_sglang_server_info,
    of_version,
    of_vllm_server_info,
)
from omni_proxy.workers.health import HealthCheck


class ModelInfo(msgspec.Struct):
    """One entry of a model list."""

    id: str
    max_model_len: int | None = None


class EventSource(msgspec.Struct, frozen=True):
    """One entry of `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    data_parallel_rank: int | None = None
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True


class _ModelList(msgspec.Struct):
    data: list[ModelInfo]


class Description(msgspec.Struct, frozen=True):
    """What a worker says of itself."""

    models: tuple[bytes, ...]
    """What it lists under /v1/models, as JSON."""
    names: tuple[str, ...]
    max_model_len: int | None
    """Of the longest of its models; None where one does not say."""
    kv_capacity_tokens: int | None
    block_tokens: int | None = None
    """Tokens in a block of its KV cache."""
    event_sources: tuple[EventSource, ...] = ()
    """Where it publishes what its cache holds."""
    facts: Facts = Facts()
    """What engine it is, and what that tells of itself."""


class Unclear(Exception):
    """The worker answers, but does not say what it is."""


class Probe:
    """One worker's questions. `shared` is the client for those that speak plain HTTP."""

    def __init__(
        self, url: str, api_key: str | None, tls: ClientFiles | None, shared: httpx.AsyncClient, timeout_s: float
    ) -> None:
        self._url = url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._files = tls
        self._health = HealthCheck(url, api_key, tls)
        self._shared = shared
        self._timeout_s = timeout_s
        self._tls: ClientTls | None = None
        self._own: httpx.AsyncClient | None = None
        """For TLS: its connections were opened with the certificates of one load."""

    async def close(self) -> None:
        """Give up the connections of its own."""
        self._health.close()
        own, self._own = self._own, None
        if own is not None:
            await own.aclose()

    async def fault(self, timeout_s: float) -> str | None:
        """Why the worker cannot be used, or None."""
        return await self._health.fault(timeout_s)

    async def describe(self) -> Description:
        """What it serves. Raises Unclear."""
        try:
            listed = await self._models()
            facts = await self._facts(listed)
            sources = await self._event_sources()
        except (httpx.HTTPError, msgspec.MsgspecError, TlsError) as exc:
            raise Unclear(type(exc).__name__) from exc
        infos = [msgspec.convert(entry, ModelInfo) for entry in listed]
        lengths = [info.max_model_len for info in infos if info.max_model_len is not None]
        longest = max(lengths) if lengths and len(lengths) == len(infos) else facts.max_model_len
        models, names = tuple(map(msgspec.json.encode, listed)), tuple(info.id for info in infos)
        return Description(models, names, longest, facts.kv_capacity_tokens, facts.block_tokens, sources, facts)

    async def engine_ids(self, port: int) -> Mapping[int, str]:
        """How its KV connector calls itself, by rank, as its bootstrap server says; empty where that is silent."""
        host = urlsplit(self._url).hostname or ""
        address = f"http://[{host}]:{port}/query" if ":" in host else f"http://{host}:{port}/query"
        try:
            response = await self._shared.get(address)
        except httpx.HTTPError:
            return {}
        return of_bootstrap(response.content) if response.status_code == 200 else {}

    async def _models(self) -> list[dict[str, object]]:
        response = await self._get("/v1/models")
        if response.status_code != 200:
            return []
        msgspec.json.decode(response.content, type=_ModelList)
        entries: list[dict[str, object]] = msgspec.json.decode(response.content)["data"]
        return entries

    async def metrics(self) -> bytes:
        """The body of its `/metrics`; empty where it has none. Raises httpx.HTTPError, TlsError."""
        return await self._body("/metrics")

    async def experts(self) -> bytes:
        """How its experts are loaded; empty where it does not tell. Raises httpx.HTTPError, TlsError."""
        return await self._body("/omni/experts")

    async def _facts(self, listed: Sequence[Mapping[str, object]]) -> Facts:
        metrics = await self.metrics()
        facts = await self._engine(of_models(listed), metrics.decode("utf-8", "replace"))
        return msgspec.structs.replace(facts, counts_experts=b"\nomni_expert_tokens_total{" in metrics)

    async def _engine(self, models: Facts, metrics: str) -> Facts:
        """What it is. Each engine has routes of its own, so that the next question follows from the last answer."""
        if models.engine == "omni":
            return joined(models, of_version(await self._body("/version")), of_metrics(metrics))
        if models.engine in ("", "sglang"):
            said = of_sglang_server_info(await self._body("/get_server_info"))
            said = said or of_sglang_server_info(await self._body("/server_info"))
            if said is not None or models.engine:
                return joined(said or Facts(), models)
        version = of_version(await self._body("/version"))
        if models.engine == "vllm" or (version.version and "vllm:" in metrics):
            info = of_vllm_server_info(await self._body("/server_info?config_format=json"))
            return joined(models, version, info, of_metrics(metrics), Facts(engine="vllm"))
        others = [of_other(path, await self._body(path)) for path in ("/props", "/info")]
        return joined(models, *others, of_metrics(metrics))

    async def _body(self, path: str) -> bytes:
        """The body of a good answer; empty for any other."""
        response = await self._get(path)
        return response.content if response.status_code == 200 else b""

    async def _event_sources(self) -> tuple[EventSource, ...]:
        """Where it publishes KV events; nowhere, if it does not know the question or answers in other words."""
        response = await self._get("/kv_event_sources")
        if response.status_code != 200:
            return ()
        try:
            told = msgspec.json.decode(response.content, type=list[EventSource] | dict[int, EventSource])
        except msgspec.MsgspecError:
            return ()
        if isinstance(told, dict):  # vLLM 0.32: by rank; later versions list them
            told = [msgspec.structs.replace(source, data_parallel_rank=rank) for rank, source in told.items()]
        return tuple(source for source in told if source.publisher == "zmq" and source.enable_kv_cache_events)

    async def _get(self, path: str) -> httpx.Response:
        return await self.ask("GET", path)

    async def ask(self, method: str, target: str, body: bytes = b"", timeout_s: float | None = None) -> httpx.Response:
        """Any question, with the worker's credentials. Raises httpx.HTTPError, TlsError."""
        client = self._shared if self._files is None else await self._client(self._files)
        name = None if self._files is None else self._files.server_name
        extensions: Mapping[str, object] = {} if name is None else {"sni_hostname": name}
        headers = self._headers | ({"content-type": "application/json"} if body else {})
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        return await client.request(
            method, self._url + target, content=body, headers=headers, extensions=dict(extensions), timeout=timeout
        )

    async def _client(self, files: ClientFiles) -> httpx.AsyncClient:
        """A client that shows and trusts what the files say now."""
        if self._tls is None:
            self._tls = ClientTls(files)
        elif self._tls.refresh():
            await self.close()
        if self._own is None:
            self._own = httpx.AsyncClient(verify=self._tls.context, timeout=self._timeout_s, trust_env=False)
        return self._own
