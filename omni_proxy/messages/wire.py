"""Events and effects where they leave a process and where they come in: for sockets and event logs. Pure.

In a union msgspec tells structs by their tags, and writes dataclasses without one: what every request brings is put
into a struct that has it.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final, get_args

import msgspec

from omni_proxy.messages.records import Placement, RequestRecord, Resume
from omni_proxy.messages.usual import (
    Arrived,
    Close,
    DecodeDone,
    FirstToken,
    LegSent,
    PrefillDone,
    StartDecode,
    StartPrefill,
)
from omni_proxy.messages.words import Mark


class Tagged(msgspec.Struct, frozen=True):
    """A message that has no tag itself; one subclass for each kind says which."""

    it: Any


_TAGGED: Final[dict[type, Any]] = {
    kind: msgspec.defstruct(kind.__name__, [("it", kind)], bases=(Tagged,), tag=True, frozen=True)
    for kind in (Arrived, LegSent, PrefillDone, FirstToken, DecodeDone, StartPrefill, StartDecode, Close)
}

# Of `tuple[Mark, ...]` mypyc keeps that it is a tuple; msgspec has to know of what.
Placement.__annotations__["candidates"] = tuple[tuple[str, float], ...]
RequestRecord.__annotations__.update(
    marks=tuple[Mark, ...], placements=tuple[Placement, ...], resumes=tuple[Resume, ...]
)


def to_wire(message: object) -> object:
    """What msgspec writes so that it can be told what it was."""
    tagged = _TAGGED.get(type(message))
    return message if tagged is None else tagged(message)


def from_wire(read: Any) -> Any:
    """The message that was given to `to_wire`."""
    return read.it if isinstance(read, Tagged) else read


def wire_type(union: object) -> Any:
    """The type, for msgspec, by which members of a union of messages are read."""
    return reduce(or_, [_TAGGED.get(kind, kind) for kind in get_args(union)])
