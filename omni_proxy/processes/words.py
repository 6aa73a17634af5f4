"""What fronts and the scheduler say to each other beside events and effects, and how each reads the other."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, get_args

import msgspec

from omni_proxy.messages import Effect, Event
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.workers.member import Member


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front's first word: the prefix of all its request ids."""

    rid_prefix: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front's last word: it ends because it was asked to."""


class EdgeRejected(msgspec.Struct, frozen=True, tag=True):
    """A front refused a request that the core never heard of; for the metrics."""

    endpoint: str
    error: str


class Members(msgspec.Struct, frozen=True, tag=True):
    """All members, whenever one comes, goes or moves."""

    members: tuple[Member, ...]


FromFront = Hello | Goodbye | EdgeRejected | EdgeNews | Event
FromScheduler = Members | Effect


def front_decoder() -> msgspec.msgpack.Decoder[Any]:
    """Reads what a scheduler says that is not in rows."""
    return _decoder(FromScheduler)


def scheduler_decoder() -> msgspec.msgpack.Decoder[Any]:
    """Reads what a front says that is not in rows."""
    return _decoder(FromFront)


def _decoder(union: object) -> msgspec.msgpack.Decoder[Any]:
    """For the structs of a union: the others of it travel as rows."""
    return msgspec.msgpack.Decoder(reduce(or_, [kind for kind in get_args(union) if issubclass(kind, msgspec.Struct)]))
