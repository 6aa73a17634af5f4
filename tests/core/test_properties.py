"""Random worlds: whatever happens in whatever order, each request ends once and everything comes home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.core import Core, CoreSettings
from omni_proxy.flow.settings import fields_of
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.lifecycle.timeline import stage_seconds, stage_spans
from omni_proxy.messages import (
    Abort,
    Arrived,
    Cancelled,
    Close,
    DecodeBroke,
    DecodeDone,
    Effect,
    Event,
    Failure,
    FailureKind,
    FirstToken,
    FrontLost,
    Lease,
    Leg,
    LegFailed,
    LegSent,
    Mode,
    PrefillDone,
    Reconfigured,
    Role,
    StartDecode,
    StartPrefill,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerSpec,
    WorkerUp,
)
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.registry import ORDERS
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings
from tests.core.steps import assert_idle, spec

pytestmark = pytest.mark.timeout(1800)  # for the thorough profile; the default one takes seconds

MODELS = ("a", "b")
GROUPS = ("1", "2")
KINDS = tuple(FailureKind)
STATUSES = (400, 429, 500, 503)

Op = tuple[int, int, int]
"""What happens, and two numbers that choose to whom and how."""


def _worker(a: int, b: int) -> WorkerSpec:
    """One of eight names; its description is mostly the same each time, and now and then another."""
    number = a % 8
    role = (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE, Role.MIXED, Role.PREFILL, Role.DECODE, Role.MIXED)[
        (number + (b % 11 == 10)) % 8
    ]
    return WorkerSpec(
        f"w{number}",
        role,
        models=((), (), ("a",), ("a", "b"))[b % 4],
        modes=tuple(Mode),
        group=GROUPS[number // 5],
        max_seqs=1 + b % 3,
        max_batch_tokens=300,
        max_model_len=(None, None, 200)[b % 3],
        kv_capacity_tokens=(None, 600)[b % 2],
        handoff_reusable=b % 2 == 1,
        kv_lease_s=(None, 5.0, 30.0)[b % 3],
        releases_kv=b % 7 == 6,
        weight=(1.0, 0.0, float("nan"), 2.0, -1.0)[b % 5],
    )


class Audit:
    """Watches effects as the edge would carry them out, and complains about those that make no sense."""

    def __init__(self, aggregated: bool, elastic: bool) -> None:
        self.aggregated = aggregated
        self.elastic = (Role.MIXED,) if elastic else ()
        """Roles that may stand for one of the two sides."""
        self.open: set[str] = set()
        self.alone: set[str] = set()
        """Requests that one worker does by itself: they ask for it, or their handoff was missed."""
        self.live: dict[Lease, WorkerSpec] = {}
        self.granted: list[Lease] = []
        self.closed: list[str] = []
        self.usable: dict[str, WorkerSpec] = {}

    def hear(self, event: Event) -> bool:
        """Note what an event ends; False when it is about nothing that lives, so that nothing may follow."""
        match event:
            case Arrived(rid, spec):
                self.open.add(rid)
                if spec.whole:
                    self.alone.add(rid)
            case PrefillDone(lease, handoff):
                if not handoff:
                    self.alone.add(lease.rid)
                return lease.leg is Leg.PREFILL and self.live.pop(lease, None) is not None
            case DecodeDone(lease):
                return lease.leg is Leg.DECODE and self.live.pop(lease, None) is not None
            case DecodeBroke(lease):
                return lease.leg is Leg.DECODE and self.live.pop(lease, None) is not None
            case LegFailed(lease):
                return self.live.pop(lease, None) is not None
            case LegSent(lease) | FirstToken(lease):
                return lease in self.live
            case Tokenized(rid) | Cancelled(rid):
                return rid in self.open
            case WorkerUp(worker):
                self.usable[worker.name] = worker
            case WorkerAdded(worker) if worker.name in self.usable:
                self.usable[worker.name] = worker
            case WorkerDown(name) | WorkerDraining(name) | WorkerRemoved(name):
                self.usable.pop(name, None)
            case _:
                pass
        return True

    def see(self, effect: Effect) -> None:
        match effect:
            case Tokenize(rid):
                assert rid in self.open
            case StartPrefill(lease):
                assert self._start(lease).role in (Role.PREFILL, *self.elastic)
                assert lease.leg is Leg.PREFILL
            case StartDecode(lease, peer):
                role = self._start(lease).role
                assert lease.leg is Leg.DECODE
                alone = role is Role.MIXED or self.aggregated or lease.rid in self.alone
                assert role in (Role.DECODE, *self.elastic) if peer is not None else alone
            case Abort(lease):
                assert self.live.pop(lease, None) is not None, f"{lease} is aborted but does not run"
            case Close():
                self._close(effect)

    def _start(self, lease: Lease) -> WorkerSpec:
        assert lease.rid in self.open, f"{lease} starts for a request that is no more"
        assert lease not in self.granted, f"{lease} starts again"
        worker = self.usable[lease.worker]
        self.granted.append(lease)
        self.live[lease] = worker
        return worker

    def _close(self, close: Close) -> None:
        assert close.rid in self.open, f"{close.rid} ends twice"
        self.open.remove(close.rid)
        self.closed.append(close.rid)
        left = [lease for lease in self.live if lease.rid == close.rid]
        assert not left, f"{close.rid} ended and left {left}"
        record = close.record
        assert record.outcome is close.outcome
        assert record.ended_at is not None
        assert all(begin <= end for _, begin, end in stage_spans(record, record.ended_at))
        assert all(seconds <= record.ended_at - record.arrived_at for seconds in stage_seconds(record, 0.0).values())
        assert [at for _, at, _ in record.marks] == sorted(at for _, at, _ in record.marks)


class World:
    """A core, and everything that can happen to it."""

    def __init__(self, mode: Mode | None, scheduling: SchedulingSettings) -> None:
        settings = CoreSettings(
            schedule_mode=mode,
            scheduling=scheduling,
            prefix_aware=True,
            queue_timeout_s=20.0,
            admission=Admission(max_waiting_requests=6, max_waiting_tokens=1500),
            retries=RetryPolicy(max_retries=2),
        )
        self.settings = settings
        self.core = Core(settings)
        aggregated = mode is Mode.AGGREGATED or scheduling.aggregate_below_tokens != 0 or scheduling.elastic_roles
        self.audit = Audit(aggregated, scheduling.elastic_roles)
        self.now = 0.0
        self.arrived = 0
        self.trace: list[list[Effect]] = []

    def tell(self, event: Event) -> None:
        """One event, and all that must hold after it."""
        alive = self.audit.hear(event)
        effects = self.core.handle(event, self.now)
        self.trace.append(effects)
        for effect in effects:
            self.audit.see(effect)
        assert alive or not effects, f"{event} is stale, yet {effects}"
        self.core.check()

    def step(self, op: Op) -> None:
        """Let one thing happen; whoever could have gone on by then was let go on."""
        what, a, b = op
        self.now += (0.0, 0.0, 1 / 64, 1.0, 7.0)[b % 5]  # whole in binary: sums are exact
        self.tick_if_due()
        self.tell(_HAPPENINGS[what % len(_HAPPENINGS)](self, a, b))
        if (at := self.core.next_wakeup()) is None or at > self.now:
            assert self.core.handle(Tick(), self.now) == [], "something was left undone"

    def tick_if_due(self) -> None:
        if (at := self.core.next_wakeup()) is not None and at <= self.now:
            self.tell(Tick())
            assert (later := self.core.next_wakeup()) is None or later > self.now, "a tick changes nothing"

    def lease(self, a: int, b: int) -> Lease:
        """Mostly one that is out, sometimes any that ever was."""
        choice = list(self.audit.live) if b % 4 and self.audit.live else self.audit.granted
        return choice[a % len(choice)] if choice else Lease("nobody", 1, "w0", Leg.PREFILL)

    def rid(self, a: int, b: int) -> str:
        choice = (
            sorted(self.audit.open) if b % 4 and self.audit.open else [f"f{n % 2}-{n}" for n in range(self.arrived)]
        )
        return choice[a % len(choice)] if choice else "nobody"

    def arrive(self, a: int, b: int) -> Event:
        self.arrived += 1
        tokens = (1, 50, 150, 250, 1000)[a % 5]
        model = MODELS[b % 2] if a % 13 else "unknown"
        return Arrived(
            f"f{(self.arrived - 1) % 2}-{self.arrived - 1}",
            spec(tokens, model, tokenize=b % 3 == 0, whole=b % 11 == 10),
        )

    def other_settings(self, a: int) -> Event:
        """Another order, another share for the late: what else the world is made of stays."""
        changed = replace(
            self.settings.scheduling,
            order=list(ORDERS)[a % len(ORDERS)],
            starved_share=(0.5, 1.0)[a % 2],
            ageing=(None, 1.0)[a % 3 == 0],
        )
        return Reconfigured(fields_of(replace(self.settings, scheduling=changed)))

    def finish(self) -> None:
        """Nobody fails any more: everything must end, and soon."""
        for _ in range(10 * (self.arrived + 1) + 200):  # sides are looked at four times a second
            for rid in sorted(self.audit.open):
                self.tell(Tokenized(rid, 10))
            for lease in list(self.audit.live):
                self.tell(PrefillDone(lease, handoff=True) if lease.leg is Leg.PREFILL else DecodeDone(lease))
            if not self.audit.open:
                break
            if not self.audit.live and (at := self.core.next_wakeup()) is not None:
                self.now = max(self.now, at)
                self.tell(Tick())
        assert not self.audit.open
        assert not self.audit.live
        assert len(self.audit.closed) == len(set(self.audit.closed)) == self.arrived
        while (at := self.core.next_wakeup()) is not None:  # what nobody pulled is freed in the end
            self.now = max(self.now, at)
            self.tell(Tick())
        assert_idle(self.core)


def _failure(a: int, b: int) -> Failure:
    kind = KINDS[b % len(KINDS)]
    status = STATUSES[a % len(STATUSES)] if kind is FailureKind.STATUS else None
    return Failure(kind, "x", status, answered=a % 3 == 0)


def _done(world: World, a: int, b: int) -> Event:
    lease = world.lease(a, b)
    if lease.leg is Leg.DECODE:
        return DecodeDone(lease, Usage(10, 5, None))
    return PrefillDone(lease, handoff=b % 5 != 4, ended=b % 7 == 6, usage=Usage((None, 12)[b % 2], 1, 3))


_HAPPENINGS: tuple[Callable[[World, int, int], Event], ...] = (
    World.arrive,
    World.arrive,
    World.arrive,
    lambda world, a, b: Tokenized(world.rid(a, b), (None, 10, 190, 900)[a % 4], (1, 2)[: b % 3]),
    lambda world, a, b: Tokenized(world.rid(a, b), 60),
    lambda world, a, b: LegSent(world.lease(a, b)),
    _done,
    _done,
    _done,
    lambda world, a, b: PrefillDone(world.lease(a, b), handoff=True),
    lambda world, a, b: FirstToken(world.lease(a, b)),
    lambda world, a, b: DecodeDone(world.lease(a, b)),
    lambda world, a, b: LegFailed(world.lease(a, b), _failure(a, b)),
    lambda world, a, b: LegFailed(world.lease(a, b), Failure(FailureKind.CONNECT, "refused")),
    lambda world, a, b: DecodeBroke(world.lease(a, b), 1 + a % 40, _failure(a, b)),
    lambda world, a, b: Cancelled(world.rid(a, b)),
    lambda world, a, b: WorkerUp(_worker(a, b)),
    lambda world, a, b: WorkerUp(_worker(a, b)),
    lambda world, a, b: WorkerUp(_worker(a, 0)),
    lambda world, a, b: WorkerAdded(_worker(a, b)),
    lambda world, a, b: WorkerDown(f"w{a % 8}", "down"),
    lambda world, a, b: WorkerDraining(f"w{a % 8}"),
    lambda world, a, b: WorkerRemoved(f"w{a % 8}"),
    lambda world, a, b: world.other_settings(a),
    lambda world, a, b: FrontLost(f"f{a % 2}-") if b % 4 == 0 else Tick(),
)

_KINDS = st.integers(0, len(_HAPPENINGS) - 1)
_NUMBERS = st.integers(0, 1 << 12)


def _long_script(seed: int) -> list[Op]:
    """What hypothesis would not write by itself: long, and with most of it about requests."""
    rng = Random(seed)
    return [
        (rng.randrange(len(_HAPPENINGS) if rng.random() < 0.6 else 12), rng.randrange(4096), rng.randrange(4096))
        for _ in range(rng.choice((40, 150)))
    ]


SCRIPTS = st.one_of(
    st.lists(st.tuples(_KINDS, _NUMBERS, _NUMBERS), max_size=60),
    st.integers(0, 1 << 32).map(_long_script),
)


SCHEDULINGS = [
    SchedulingSettings(order, starvation_timeout_s=5.0, fair_tenants=number % 2 == 1, aggregate_below_tokens=below)
    for number, order in enumerate(ORDERS)
    for below in (0, None, 60)
] + [
    SchedulingSettings(elastic_roles=True, tpot_limit_s=0.016, aggregate_below_tokens=None),
    SchedulingSettings(tpot_limit_s=0.05, aggregate_below_tokens=None),
    SchedulingSettings(
        elastic_roles=True, length_buckets=(LengthBucket(60, ("w0", "w1")), LengthBucket(None, ("w2",)))
    ),
]


def play(mode: Mode | None, scheduling: SchedulingSettings, script: list[Op]) -> World:
    """A whole world, from five workers to its end."""
    world = World(mode, scheduling)
    for number in range(5):
        world.tell(WorkerUp(_worker(number, 0)))
    for op in script:
        world.step(op)
    world.finish()
    return world


@pytest.mark.parametrize("mode", [None, *Mode])
@given(script=SCRIPTS, scheduling=st.sampled_from(SCHEDULINGS))
def test_every_request_ends_once_and_everything_comes_home(
    mode: Mode | None, scheduling: SchedulingSettings, script: list[Op]
) -> None:
    play(mode, scheduling, script)


@given(script=SCRIPTS, mode=st.sampled_from([None, *Mode]), scheduling=st.sampled_from(SCHEDULINGS))
def test_one_script_has_one_trace(mode: Mode | None, scheduling: SchedulingSettings, script: list[Op]) -> None:
    assert play(mode, scheduling, script).trace == play(mode, scheduling, script).trace


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_scripts_of_faults() -> None:
    """As above, by number: one script for each seed, with modes and settings in turn."""
    modes, ended = [None, *Mode], 0
    for seed in range(10_000):
        world = play(modes[seed % len(modes)], SCHEDULINGS[seed % len(SCHEDULINGS)], _long_script(seed))
        ended += len(world.audit.closed)
    assert ended > 100_000
