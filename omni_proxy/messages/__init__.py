"""What the core hears and what it asks for: the closed unions `Event` and `Effect`. Pure.

Events are past tense, effects are imperative; nobody changes one that has been made. What every request brings is in
`usual` and `records`, native classes that compiled code reads like variables; the rest, in `rare`, are structs. Between
processes and into event logs both travel alike (`wire`).
Nothing here knows HTTP, sockets or token bytes: those stay on the data road.
"""

from __future__ import annotations

from omni_proxy.messages.rare import (
    Abort,
    Adopted,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Cancelled,
    DecodeBroke,
    Failure,
    Foresee,
    Forget,
    FrontLost,
    LegFailed,
    OthersHeard,
    Prewarm,
    Reconfigured,
    Tick,
    Tokenize,
    Tokenized,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerShare,
    WorkerSpec,
    WorkerUp,
)
from omni_proxy.messages.records import Placement, RequestRecord, Resume
from omni_proxy.messages.usual import (
    Arrived,
    Close,
    DecodeDone,
    FirstToken,
    Lease,
    LegSent,
    PrefillDone,
    RequestSpec,
    StartDecode,
    StartPrefill,
    Usage,
)
from omni_proxy.messages.words import FailureKind, Leg, Mark, Mode, Outcome, Role, Stage

RareEvent = (
    Tokenized
    | LegFailed
    | DecodeBroke
    | Cancelled
    | WorkerAdded
    | WorkerUp
    | WorkerDown
    | WorkerDraining
    | WorkerRemoved
    | FrontLost
    | Adopted
    | OthersHeard
    | Reconfigured
    | Tick
    | BlocksStored
    | BlocksRemoved
    | CacheCleared
)
"""What not every request brings."""

Event = Arrived | LegSent | PrefillDone | FirstToken | DecodeDone | RareEvent
Effect = Tokenize | StartPrefill | StartDecode | Abort | Close | Foresee | Forget | Prewarm

__all__ = [
    "Effect",
    "Event",
    "Abort",
    "Adopted",
    "Arrived",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "Cancelled",
    "Close",
    "DecodeBroke",
    "DecodeDone",
    "Failure",
    "FailureKind",
    "FirstToken",
    "Foresee",
    "Forget",
    "FrontLost",
    "Lease",
    "Leg",
    "LegFailed",
    "LegSent",
    "Mark",
    "Mode",
    "OthersHeard",
    "Outcome",
    "Placement",
    "PrefillDone",
    "Prewarm",
    "RareEvent",
    "Reconfigured",
    "RequestRecord",
    "RequestSpec",
    "Resume",
    "Role",
    "Stage",
    "StartDecode",
    "StartPrefill",
    "Tick",
    "Tokenize",
    "Tokenized",
    "Usage",
    "WorkerAdded",
    "WorkerDown",
    "WorkerDraining",
    "WorkerRemoved",
    "WorkerShare",
    "WorkerSpec",
    "WorkerUp",
]
