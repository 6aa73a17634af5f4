"""Who is there: the members, what they say of themselves, and whether they answer.

Each member is probed on its own: `/health` decides up or down, `/v1/models` and `/metrics` tell model names, context
length and KV capacity once it is up. Probes use httpx and never share a connection with requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from omni_proxy.config import Health, Worker
from omni_proxy.messages import Event, WorkerAdded, WorkerDown, WorkerRemoved, WorkerSpec, WorkerUp
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.upstream import Member

logger = logging.getLogger(__name__)

_CACHE_INFO: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class _ModelInfo(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelInfo]


@dataclass(slots=True)
class _Watched:
    config: Worker
    task: asyncio.Task[None] | None = None
    up: bool = False
    models: tuple[bytes, ...] = ()
    """What it lists under /v1/models, as JSON."""


class Membership:
    """The members by name, and the tasks that watch them."""

    def __init__(self, post: Callable[[Event], None], health: Health) -> None:
        self._post = post
        self._health = health
        self._members: dict[str, _Watched] = {}
        self._listeners: list[Callable[[tuple[Member, ...]], None]] = []
        self._client = httpx.AsyncClient(timeout=health.timeout_s, trust_env=False)

    def on_change(self, listener: Callable[[tuple[Member, ...]], None]) -> None:
        """Have somebody told of all members whenever one comes, goes or moves; he hears of it before the core."""
        self._listeners.append(listener)

    def members(self) -> tuple[Member, ...]:
        """All members as those who send requests need them."""
        return tuple(_member(watched.config) for watched in self._members.values())

    # ------------------------------------------------------------------ changes

    def add(self, worker: Worker) -> None:
        """Take in a member, or one that came back under another address."""
        old = self._members.pop(worker.name, None)
        if old is not None:
            self._stop(old)
        member = self._members[worker.name] = _Watched(worker)
        self._tell()
        self._post(WorkerAdded(_spec(worker, (), None, None)))
        if not worker.down:
            member.task = asyncio.create_task(self._watch(member), name=f"watch {worker.name}")

    def lost(self, name: str, reason: str) -> None:
        """Somebody knows that a member is gone (its process ended); probes find out when it is back."""
        member = self._members.get(name)
        if member is not None:
            member.up = False
            self._post(WorkerDown(name, reason))

    def remove(self, name: str) -> None:
        """Forget a member."""
        member = self._members.pop(name, None)
        if member is not None:
            self._stop(member)
            self._post(WorkerRemoved(name))
            self._tell()

    async def close(self) -> None:
        """Stop watching."""
        tasks = [m.task for m in self._members.values() if m.task is not None]
        for member in self._members.values():
            self._stop(member)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def models(self) -> list[bytes]:
        """The models of all members that are up, each once, as the JSON that a worker gave."""
        found: dict[str, bytes] = {}
        for member in self._members.values():
            for raw in member.models if member.up else ():
                found.setdefault(msgspec.json.decode(raw, type=_ModelInfo).id, raw)
        return [found[name] for name in sorted(found)]

    def _tell(self) -> None:
        members = self.members()
        for listener in self._listeners:
            listener(members)

    def _stop(self, member: _Watched) -> None:
        if member.task is not None:
            member.task.cancel()

    # ------------------------------------------------------------------- probes

    async def _watch(self, member: _Watched) -> None:
        failures = 0
        while True:
            reason = await self._probe(member)
            if reason is None:
                failures = 0
                if not member.up:
                    await self._welcome(member)
            else:
                failures += 1
                if member.up and failures >= self._health.failures_down:
                    logger.warning("worker %s is down: %s", member.config.name, reason)
                    member.up = False
                    self._post(WorkerDown(member.config.name, reason))
            # Until it is there for the first time, look often: somebody waits for it to start.
            await asyncio.sleep(self._health.interval_s if member.up else min(0.2, self._health.interval_s))

    async def _probe(self, member: _Watched) -> str | None:
        """Why the member cannot be used, or None."""
        try:
            response = await self._get(member, "/health")
        except httpx.TimeoutException:
            return "no answer to /health in time"
        except httpx.HTTPError as exc:
            return f"cannot be reached ({type(exc).__name__})"
        return None if response.status_code == 200 else f"/health says {response.status_code}"

    async def _welcome(self, member: _Watched) -> None:
        """Learn what a member is, then let it be used."""
        worker = member.config
        try:
            listed = await self._models_of(member)
            capacity = await self._kv_capacity(member)
        except (httpx.HTTPError, msgspec.MsgspecError) as exc:
            logger.warning("worker %s does not say what it serves (%s)", worker.name, type(exc).__name__)
            return
        member.models = tuple(map(msgspec.json.encode, listed))
        infos = [msgspec.convert(entry, _ModelInfo) for entry in listed]
        lengths = [info.max_model_len for info in infos if info.max_model_len is not None]
        longest = max(lengths) if lengths and len(lengths) == len(infos) else None
        member.up = True
        logger.info("worker %s (%s) is up", worker.name, worker.role.value)
        self._post(WorkerUp(_spec(worker, tuple(info.id for info in infos), longest, capacity)))

    async def _models_of(self, member: _Watched) -> list[dict[str, object]]:
        response = await self._get(member, "/v1/models")
        if response.status_code != 200:
            return []
        msgspec.json.decode(response.content, type=_ModelList)
        entries: list[dict[str, object]] = msgspec.json.decode(response.content)["data"]
        return entries

    async def _kv_capacity(self, member: _Watched) -> int | None:
        """Tokens of KV cache, where the worker's metrics tell block size and count as vLLM's do."""
        response = await self._get(member, "/metrics")
        found = _CACHE_INFO.search(response.text) if response.status_code == 200 else None
        labels = dict(_LABEL.findall(found[1])) if found else {}
        try:
            return int(labels["block_size"]) * int(labels["num_gpu_blocks"]) or None
        except (KeyError, ValueError):
            return None

    async def _get(self, member: _Watched, path: str) -> httpx.Response:
        key = member.config.api_key
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return await self._client.get(member.config.url + path, headers=headers)


def _member(worker: Worker) -> Member:
    return Member(worker.name, worker.url, worker.connector, worker.api_key, worker.bootstrap_port)


def _spec(worker: Worker, models: tuple[str, ...], max_model_len: int | None, capacity: int | None) -> WorkerSpec:
    connector = CONNECTORS[worker.connector]
    return WorkerSpec(
        name=worker.name,
        role=worker.role,
        models=worker.models if worker.models is not None else models,
        modes=connector.modes,
        group=worker.group,
        connector=worker.connector,
        max_seqs=worker.max_seqs,
        max_batch_tokens=worker.max_batch_tokens,
        max_model_len=max_model_len,
        kv_capacity_tokens=capacity,
        handoff_reusable=connector.handoff_reusable,
        weight=worker.weight,
        backup=worker.backup,
        slow_start_s=worker.slow_start_s,
        max_fails=worker.max_fails,
        fail_timeout_s=worker.fail_timeout_s,
    )
