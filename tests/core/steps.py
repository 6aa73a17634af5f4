"""Tables of steps for a core: what it hears, and what it must ask for in answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from omni_proxy.core import Core, CoreSettings
from omni_proxy.errors import ErrorCode
from omni_proxy.messages import (
    Close,
    Effect,
    Event,
    Failure,
    FailureKind,
    Lease,
    Leg,
    Mode,
    Outcome,
    RequestRecord,
    RequestSpec,
    Role,
    StartDecode,
    StartPrefill,
    WorkerSpec,
    WorkerUp,
)


class At(NamedTuple):
    """An event at another instant than the step before."""

    now: float
    event: Event


class Ended(NamedTuple):
    """The part of a `Close` that a table names."""

    rid: str
    outcome: Outcome
    error: ErrorCode | None = None
    failed: Lease | None = None


Step = tuple[Event | At, Sequence[Effect | Ended]]


def run(core: Core, steps: Iterable[Step], now: float = 0.0) -> list[RequestRecord]:
    """Walk a table, checking effects and conservation after each step; returns the records of what ended."""
    records: list[RequestRecord] = []
    for number, (event, expected) in enumerate(steps):
        if isinstance(event, At):
            now, event = event
        effects = core.handle(event, now)
        core.check()
        assert [_brief(e) for e in effects] == list(expected), f"step {number}: {event}"
        records += [e.record for e in effects if isinstance(e, Close)]
    return records


def _brief(effect: Effect) -> Effect | Ended:
    if isinstance(effect, Close):
        return Ended(effect.rid, effect.outcome, effect.error, effect.failed)
    return effect


def worker(name: str, **more: object) -> WorkerSpec:
    """A worker whose first letter says its role: p, d, or m for mixed. It can do every mode unless told otherwise."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
    return WorkerSpec(**{"name": name, "role": role, "modes": tuple(Mode), **more})  # type: ignore[arg-type]


def spec(prompt_tokens: int = 100, model: str = "m", **more: object) -> RequestSpec:
    """A chat request."""
    fields = {"model": model, "endpoint": "chat", "prompt_tokens": prompt_tokens, **more}
    return RequestSpec(**fields)  # type: ignore[arg-type]


def core_of(*workers: WorkerSpec | str, **settings: object) -> Core:
    """A core whose workers are all up."""
    core = Core(CoreSettings(**settings))  # type: ignore[arg-type]
    for one in workers:
        assert core.handle(WorkerUp(worker(one) if isinstance(one, str) else one), 0.0) == []
    return core


def p(rid: str, attempt: int, name: str) -> Lease:
    """A lease for a P leg."""
    return Lease(rid, attempt, name, Leg.PREFILL)


def d(rid: str, attempt: int, name: str) -> Lease:
    """A lease for a D leg."""
    return Lease(rid, attempt, name, Leg.DECODE)


def start_p(rid: str, attempt: int, name: str, peer: str | None = None) -> StartPrefill:
    return StartPrefill(p(rid, attempt, name), peer)


def start_d(rid: str, attempt: int, name: str, peer: str | None = None, until: float | None = None) -> StartDecode:
    return StartDecode(d(rid, attempt, name), peer, until)


def done(rid: str) -> Ended:
    """A request that ended well."""
    return Ended(rid, Outcome.COMPLETED)


REFUSED = Failure(FailureKind.CONNECT, "refused")
CLOSED = Failure(FailureKind.CLOSED, "closed")
CUT = Failure(FailureKind.CLOSED, "closed", answered=True)
SILENT = Failure(FailureKind.TIMEOUT, "no first byte within 5 s")
GARBAGE = Failure(FailureKind.GARBAGE, "no HTTP")
LATE = Failure(FailureKind.LATE, "no connection in time")


def status(code: int) -> Failure:
    """A whole answer with an error status."""
    return Failure(FailureKind.STATUS, "status", status=code, answered=True)


def assert_idle(core: Core) -> None:
    """Nothing is left of any request."""
    core.check()
    assert list(core.records()) == []
    assert core.waiting() == (0, 0)
    assert core.next_wakeup() is None
    assert [(w.seqs, w.prefill_tokens, w.kv_tokens) for w in core.workers()] == [(0, 0, 0) for _ in core.workers()]
