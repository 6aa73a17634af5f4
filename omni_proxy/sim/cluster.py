"""Which workers a simulated world has, and what the gateway is told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from omni_proxy.config import ConfigError
from omni_proxy.messages import Mode, Role, WorkerSpec
from omni_proxy.sim.engine_model import EngineModel

CONNECTOR = "simulated"


@dataclass(frozen=True, slots=True)
class SimWorker:
    """One worker: what the gateway hears of it, and the engine that it has."""

    spec: WorkerSpec
    model: EngineModel

    @property
    def max_seqs(self) -> int:
        """Sequences that the engine itself runs at once."""
        return self.model.max_prefill_seqs if self.spec.role is Role.PREFILL else self.model.max_decode_seqs


def make_worker(name: str, role: Role, model: EngineModel, max_batch_tokens: int = 32_000) -> SimWorker:
    """A worker with the limits of its engine. `max_batch_tokens`: prompt tokens that the gateway may leave with it."""
    max_seqs = model.max_prefill_seqs if role is Role.PREFILL else model.max_decode_seqs
    spec = WorkerSpec(
        name=name,
        role=role,
        modes=tuple(Mode),
        connector=CONNECTOR,
        max_seqs=max_seqs,
        max_batch_tokens=max(max_batch_tokens, model.max_batch_tokens),
        max_model_len=model.max_model_len,
        kv_capacity_tokens=model.kv_capacity_tokens,
        handoff_reusable=True,
    )
    return SimWorker(spec, model)


def make_cluster(prefill: int, decode: int, mixed: int, model: EngineModel) -> tuple[SimWorker, ...]:
    """xP + yD and workers that do both, named as `omni-proxy up` names them."""
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed))
    names = ((f"{role.value}-{i}", role) for role, count in counts for i in range(count))
    return tuple(make_worker(name, role, model) for name, role in names)


def slowed(workers: Sequence[SimWorker], factors: Mapping[str, float]) -> tuple[SimWorker, ...]:
    """The same workers, some of them slower. Raises ConfigError for a name that nobody has."""
    unknown = factors.keys() - {worker.spec.name for worker in workers}
    if unknown:
        names = ", ".join(worker.spec.name for worker in workers)
        raise ConfigError(f"--slow: there is no worker {min(unknown)!r}; known are {names}")
    return tuple(SimWorker(w.spec, w.model.slower(factors.get(w.spec.name, 1.0))) for w in workers)


def with_blocks(worker: SimWorker, block_tokens: int) -> SimWorker:
    """The same worker with blocks of that size."""
    return SimWorker(structs.replace(worker.spec, block_tokens=block_tokens), worker.model)


def prefill_workers(workers: Iterable[SimWorker]) -> list[SimWorker]:
    """Those that compute prompts: P, and those that do both."""
    return [w for w in workers if w.spec.role is not Role.DECODE]
