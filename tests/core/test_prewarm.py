"""What next turns begin with is computed while P idles, and is gone the moment that real work comes."""

from __future__ import annotations

import random

import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.flow.settings import fields_of
from omni_proxy.messages import (
    Abort,
    Arrived,
    Cancelled,
    Close,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    Foresee,
    Forget,
    FrontLost,
    Lease,
    Leg,
    LegFailed,
    PrefillDone,
    Prewarm,
    Reconfigured,
    StartDecode,
    StartPrefill,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerDown,
    WorkerUp,
)
from tests.core.steps import CLOSED, core_of, spec, worker

BLOCK = 16
PROMPT, ANSWER = 640, 320


def keys(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(seed * 1000 + 1, seed * 1000 + 1 + tokens // BLOCK))


def warm_core(*names: str, **settings: object) -> Core:
    return core_of(*names, prefix_aware=True, prewarm=PrewarmSettings(**settings))  # type: ignore[arg-type]


def turn(core: Core, rid: str, seed: int, tokens: int = PROMPT, now: float = 0.0) -> tuple[str, list[Effect]]:
    """A whole request; returns its P and the effects of its end."""
    core.handle(Arrived(rid, spec(tokens, tokenize=True)), now)
    effects = core.handle(Tokenized(rid, tokens, keys(seed, tokens)), now)
    (start,) = [e for e in effects if isinstance(e, StartPrefill)]
    (decode,) = [e for e in core.handle(PrefillDone(start.lease, True), now + 0.1) if isinstance(e, StartDecode)]
    core.handle(FirstToken(decode.lease), now + 0.2)
    ended = core.handle(DecodeDone(decode.lease, Usage(tokens, ANSWER)), now + 0.3)
    core.check()
    return start.lease.worker, ended


def foresee(core: Core, rid: str, seed: int, tokens: int = PROMPT + ANSWER, now: float = 0.4) -> list[Effect]:
    effects = core.handle(Tokenized(rid, tokens, keys(seed, tokens)), now)
    core.check()
    return effects


def ahead(rid: str, name: str) -> Lease:
    return Lease(rid, 0, name, Leg.PREWARM)


def test_an_idle_worker_computes_what_the_next_turn_begins_with() -> None:
    core = warm_core("p0", "p1", "d0")
    name, ended = turn(core, "a", 1)
    assert ended[0] == Foresee("a")
    assert isinstance(ended[1], Close)
    assert foresee(core, "a", 1) == [Prewarm(ahead("a", name))]
    assert core.handle(PrefillDone(ahead("a", name), False, usage=Usage(960, 1, 640)), 0.5) == []
    core.handle(Arrived("b", spec(1200, tokenize=True)), 1.0)
    (start,) = core.handle(Tokenized("b", 1200, keys(1, 1200)), 1.0)
    assert isinstance(start, StartPrefill)
    assert start.lease.worker == name
    (record,) = core.records()
    assert record.predicted_tokens == 960
    counts = core.prewarms()
    assert counts is not None
    assert (counts.sent, counts.finished, counts.used_tokens, counts.wasted_tokens) == (1, 1, 320, 0)


def test_the_same_prompt_again_wastes_what_was_computed_for_its_first_answer() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    foresee(core, "a", 1)
    core.handle(PrefillDone(ahead("a", "p0"), False), 0.5)
    turn(core, "again", 1, now=1.0)
    counts = core.prewarms()
    assert counts is not None
    assert (counts.finished, counts.used_tokens, counts.wasted_tokens) == (1, 0, 320)


def test_real_work_ends_it_before_it_begins_itself() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    assert foresee(core, "a", 1) == [Prewarm(ahead("a", "p0"))]
    core.handle(Arrived("x", spec(100, tokenize=True)), 0.5)
    abort, start = core.handle(Tokenized("x", 100, keys(7, 100)), 0.5)
    core.check()
    assert abort == Abort(ahead("a", "p0"))
    assert isinstance(start, StartPrefill)
    assert core.handle(PrefillDone(ahead("a", "p0"), False), 0.6) == []  # stale
    assert core.caches is not None
    assert core.caches.match(keys(1, 960))["p0"] == 640
    counts = core.prewarms()
    assert counts is not None
    assert (counts.cancelled, counts.finished, counts.wasted_tokens) == (1, 0, 320)


def test_a_turn_that_comes_too_early_takes_its_place() -> None:
    core = warm_core("p0", "p1", "d0")
    name, _ = turn(core, "a", 1)
    foresee(core, "a", 1)
    core.handle(Arrived("b", spec(1200, tokenize=True)), 0.5)
    effects = core.handle(Tokenized("b", 1200, keys(1, 1200)), 0.5)
    core.check()
    assert effects[0] == Abort(ahead("a", name))


def test_it_waits_until_its_worker_is_idle() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    core.handle(Arrived("x", spec(100, tokenize=True)), 0.35)
    (start,) = core.handle(Tokenized("x", 100, keys(7, 100)), 0.35)
    assert isinstance(start, StartPrefill)
    assert foresee(core, "a", 1) == []
    decode, prewarm = core.handle(PrefillDone(start.lease, True), 0.5)
    core.check()
    assert isinstance(decode, StartDecode)
    assert prewarm == Prewarm(ahead("a", "p0"))


def test_it_waits_no_longer_than_it_may() -> None:
    core = warm_core("p0", "d0", wait_s=1.0)
    turn(core, "a", 1)
    core.handle(Arrived("x", spec(100, tokenize=True)), 0.35)
    core.handle(Tokenized("x", 100, keys(7, 100)), 0.35)
    assert foresee(core, "a", 1) == []
    assert core.handle(Tick(), 2.0) == [Forget("a")]


@pytest.mark.parametrize("tokens", [None, PROMPT + 5, PROMPT + 5000])
def test_what_is_not_known_or_not_worth_it_is_forgotten(tokens: int | None) -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    known = () if tokens is None else keys(1, tokens)
    assert core.handle(Tokenized("a", tokens, known), 0.4) == [Forget("a")]
    core.check()


def test_a_failure_is_nobodys_fault_and_tried_once() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    foresee(core, "a", 1)
    assert core.handle(LegFailed(ahead("a", "p0"), CLOSED), 0.5) == []
    (p0,) = [w for w in core.workers() if w.spec.name == "p0"]
    assert p0.usable(0.5)
    counts = core.prewarms()
    assert counts is not None
    assert (counts.failed, counts.wasted_tokens) == (1, 320)


def test_the_share_of_time_bounds_it() -> None:
    core = warm_core("p0", "d0", share=0.001, wait_s=1e6)
    sent = 0
    for number in range(20):
        turn(core, f"r{number}", number, now=float(number))
        effects = foresee(core, f"r{number}", number, now=number + 0.4)
        if effects:
            sent += 1
            core.handle(PrefillDone(ahead(f"r{number}", "p0"), False), number + 0.5)
    assert 1 <= sent <= 3
    at = core.next_wakeup()
    assert at is not None
    assert at > 19.4
    assert [type(e) for e in core.handle(Tick(), at)] == [Prewarm]


def test_tokens_a_second_bound_it() -> None:
    core = warm_core("p0", "p1", "d0", tokens_per_s=10.0)
    turn(core, "a", 1)
    assert len(foresee(core, "a", 1)) == 1
    turn(core, "b", 2, now=1.0)
    assert foresee(core, "b", 2, now=1.4) == []


def test_nothing_is_computed_where_holding_up_others_costs_more_than_it_gains() -> None:
    core = warm_core("p0", "d0", share=1.0)
    now = 0.0
    for number in range(200):  # a prompt every millisecond, each done at once
        now = number * 0.001
        rid = f"x{number}"
        core.handle(Arrived(rid, spec(50, tokenize=True)), now)
        core.handle(Tokenized(rid, 50, keys(100 + number, 50)), now)
        core.handle(Cancelled(rid), now)
    turn(core, "a", 1, now=now)
    assert foresee(core, "a", 1, now=now + 0.4) == [Forget("a")]


def test_a_worker_or_a_front_that_goes_takes_it_along() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a1", 1)
    foresee(core, "a1", 1)
    assert core.handle(WorkerDown("p0", "gone"), 0.5) == [Abort(ahead("a1", "p0"))]
    core.check()
    core.handle(WorkerUp(worker("p0")), 0.6)
    turn(core, "a2", 2, now=1.0)
    foresee(core, "a2", 2, now=1.4)
    core.handle(FrontLost("a"), 1.5)
    core.check()
    assert core.handle(PrefillDone(ahead("a2", "p0"), False), 1.6) == []


def test_it_is_switched_off_and_on() -> None:
    core = warm_core("p0", "d0")
    turn(core, "a", 1)
    foresee(core, "a", 1)
    assert Abort(ahead("a", "p0")) in core.handle(Reconfigured(fields_of(CoreSettings(prefix_aware=True))), 0.5)
    assert core.prewarms() is None
    _, ended = turn(core, "b", 2, now=1.0)
    assert len(ended) == 1
    on = CoreSettings(prefix_aware=True, prewarm=PrewarmSettings())
    core.handle(Reconfigured(fields_of(on)), 2.0)
    _, ended = turn(core, "c", 3, now=3.0)
    assert ended[0] == Foresee("c")


@pytest.mark.parametrize("seed", range(30))
def test_it_never_changes_what_becomes_of_real_requests(seed: int) -> None:
    """The same script with and without: as long as nothing computed ahead ends, real effects are the same.

    After the first that is cancelled both may learn different speeds, so only what holds always is looked at: none is
    ever beside real work (`Core.check`), and each is aborted in front of the work that takes its worker.
    """
    names = ("p0", "p1", "p2", "d0", "d1")
    with_, without = warm_core(*names, share=1.0), core_of(*names, prefix_aware=True)
    chance, now, live, number, sent = random.Random(seed), 0.0, [], 0, 0
    equal, compared = True, 0
    for _ in range(300):
        now += chance.expovariate(20.0)
        if not live or chance.random() < 0.3:
            number += 1
            tokens = chance.choice((200, 640, 3000))
            events: list[Event] = [Arrived(f"r{number}", spec(tokens, tokenize=True))]
            seed_of = chance.randrange(1, 12)
            events.append(Tokenized(f"r{number}", tokens, keys(seed_of, tokens)))
        else:
            events = [live.pop(chance.randrange(len(live)))]
        for event in events:
            warm = with_.handle(event, now)
            with_.check()
            real = [e for e in warm if not _extra(e)]
            if equal:
                assert real == without.handle(event, now)
                compared += 1
            equal = equal and not any(isinstance(e, Abort) and _extra(e) for e in warm)
            for place, effect in enumerate(warm):
                if isinstance(effect, Abort) and _extra(effect):
                    assert not any(isinstance(e, StartPrefill) for e in warm[:place])
                if isinstance(effect, Foresee):
                    told = Tokenized(effect.rid, 4000, keys(chance.randrange(1, 12), 4000))
                    follow = with_.handle(told, now)
                    with_.check()
                    assert all(_extra(e) for e in follow)
                    sent += sum(isinstance(e, Prewarm) for e in follow)
            live += [answer for effect in real if (answer := _answer(effect)) is not None]
    assert sent > 0
    assert compared > 3


def _extra(effect: Effect) -> bool:
    lease = getattr(effect, "lease", None)
    return isinstance(effect, Foresee | Forget | Prewarm) or (lease is not None and lease.leg is Leg.PREWARM)


def _answer(effect: Effect) -> Event | None:
    match effect:
        case StartPrefill(lease):
            return PrefillDone(lease, True)
        case StartDecode(lease):
            return DecodeDone(lease, Usage(None, 50))
        case Tokenize() | Close() | _:
            return None
