"""Events and effects travel between processes: each comes back as what it was."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from omni_proxy.errors import ErrorCode
from omni_proxy.messages import (
    Abort,
    Adopted,
    Arrived,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Cancelled,
    Close,
    DecodeBroke,
    DecodeDone,
    Effect,
    Event,
    Failure,
    FailureKind,
    FirstToken,
    Foresee,
    Forget,
    FrontLost,
    Lease,
    Leg,
    LegFailed,
    LegSent,
    Mode,
    OthersHeard,
    Outcome,
    Placement,
    PrefillDone,
    Prewarm,
    Reconfigured,
    RequestRecord,
    RequestSpec,
    Resume,
    Role,
    Stage,
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
    WorkerShare,
    WorkerSpec,
    WorkerUp,
)
from omni_proxy.messages.packed import pack, unpack
from omni_proxy.messages.wire import from_wire, to_wire, wire_type

P, D = Lease("r", 1, "p0", Leg.PREFILL), Lease("r", 2, "d0", Leg.DECODE)
WORKER = WorkerSpec("p0", Role.PREFILL, ("m",), (Mode.PARALLEL,), "g", "vllm-nixl", 4, 99, 8192, 10_000, True, 2.5)
RECORD = RequestRecord(
    "r",
    "ext",
    "m",
    "chat",
    True,
    Mode.SEQUENTIAL,
    ((Stage.RECEIVED, 0.5, 0), (Stage.FINISHED, 2.5, 2)),
    1.0,
    None,
    Outcome.FAILED,
    ErrorCode.WORKER_ERROR,
    "why",
    (Placement("p0", Leg.PREFILL, "least", (("p0", 0.0), ("p1", 7.5))),),
    2,
    100,
    64,
    None,
    "tenant",
    resumes=(Resume(1.5, "d0", 40),),
)
EVENTS: list[Event] = [
    Arrived("r", RequestSpec("m", "chat", 100, 5, True, -1, True, "ext", "tenant")),
    Tokenized("r", None),
    Tokenized("r", 7, (1 << 62, 2)),
    LegSent(P),
    PrefillDone(P, True, False, Usage(1, 2, 3)),
    FirstToken(D),
    DecodeDone(D),
    LegFailed(D, Failure(FailureKind.STATUS, "busy", 503, True)),
    DecodeBroke(D, 40, Failure(FailureKind.GAVE_UP, "recomputed", None, True)),
    Cancelled("r"),
    WorkerAdded(WORKER),
    WorkerUp(WORKER),
    WorkerDown("p0", "died"),
    WorkerDraining("p0"),
    WorkerRemoved("p0"),
    FrontLost("f1-"),
    Adopted("r", RequestSpec("m", "chat", 100), P, D, "p0", True),
    OthersHeard(2, 1, 0.01, (WorkerShare("p0", 1, 10, 20, 0.5),), 3, (("t", 100),), (("s", "p0"),), (("p1", 4.0),)),
    Reconfigured({"max_fails": 2, "schedule_mode": None}),
    Tick(),
    BlocksStored("p0", 1, 128, (1 << 63, 5), 2),
    BlocksRemoved("p0", 1, (1 << 63,)),
    CacheCleared("p0", 1),
]
EFFECTS: list[Effect] = [
    Tokenize("r"),
    StartPrefill(P, "d0"),
    StartDecode(D),
    Abort(P),
    Foresee("r"),
    Forget("r"),
    Prewarm(Lease("r", 0, "p0", Leg.PREWARM)),
    Close("r", Outcome.FAILED, RECORD, ErrorCode.WORKER_ERROR, "why", D, 1.0),
]


def _there_and_back(message: Event | Effect, union: object) -> object:
    decoder = msgspec.msgpack.Decoder(wire_type(union))
    return from_wire(decoder.decode(msgspec.msgpack.encode(to_wire(message))))


def test_each_member_of_the_unions_has_an_example() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(effect) for effect in EFFECTS} == set(get_args(Effect))


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_come_back(event: Event) -> None:
    back = _there_and_back(event, Event)
    assert type(back) is type(event)
    assert back == event


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda e: type(e).__name__)
def test_effects_come_back(effect: Effect) -> None:
    back = _there_and_back(effect, Effect)
    assert type(back) is type(effect)
    assert back == effect


def test_block_keys_may_be_as_large_as_the_wire_allows() -> None:
    event: Event = Tokenized("r", 1, ((1 << 64) - 1,))
    assert _there_and_back(event, Event) == event


def test_a_record_knows_its_ends() -> None:
    assert (RECORD.arrived_at, RECORD.ended_at) == (0.5, 2.5)


def test_structs_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WORKER.name = "p1"  # type: ignore[misc]


def test_leases_are_compared_by_what_they_say() -> None:
    same = Lease("r", 1, "p0", Leg.PREFILL)
    assert same == P
    assert hash(same) == hash(P)
    others = (Lease("q", 1, "p0", Leg.PREFILL), D, Lease("r", 1, "p1", Leg.PREFILL), Lease("r", 1, "p0", Leg.DECODE))
    assert P not in others


USUAL = [message for message in [*EVENTS, *EFFECTS] if not isinstance(message, msgspec.Struct)]
FULL = [
    Arrived("r", RequestSpec("m", "chat", 1, None, False, 0, False, "", "", True, True, "s", 1.5, 0.25)),
    PrefillDone(P, False, True, Usage()),
    StartDecode(D, "p0", 7.5),
    Close("r", Outcome.COMPLETED, RECORD),
]


def _packed_and_back(message: object) -> object:
    row = pack(message)
    assert row is not None
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(row)))


@pytest.mark.parametrize("message", [*USUAL, *FULL], ids=lambda m: type(m).__name__)
def test_what_every_request_brings_comes_back_from_its_row(message: object) -> None:
    back = _packed_and_back(message)
    assert type(back) is type(message)
    assert back == message


def test_words_come_back_as_the_words_they_were() -> None:
    close = _packed_and_back(EFFECTS[-1])
    assert isinstance(close, Close)
    assert type(close.outcome) is Outcome
    assert type(close.error) is ErrorCode
    assert close.failed is not None
    assert close.failed.leg is Leg.DECODE
    assert [type(stage) for stage, _, _ in close.record.marks] == [Stage, Stage]
    assert close.record.mode is Mode.SEQUENTIAL
    assert close.record.placements[0].leg is Leg.PREFILL


@pytest.mark.parametrize("message", [m for m in [*EVENTS, *EFFECTS] if isinstance(m, msgspec.Struct)], ids=repr)
def test_the_rest_has_no_row(message: object) -> None:
    assert pack(message) is None


@pytest.mark.parametrize("row", [[], [0], [99, "r"], ["a"], [2, "r", 1], [2, "r", 1, "p0", 7], [8]])
def test_what_is_no_row_is_said_to_be_none(row: list[object]) -> None:
    with pytest.raises((TypeError, ValueError, IndexError, KeyError)):
        unpack(row)
