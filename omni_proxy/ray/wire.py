"""What the process that places workers tells the gateway, one JSON object a line."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Starting(Struct, tag="starting"):
    """A worker is placed, or waits for room."""

    name: str


class Serving(Struct, tag="serving"):
    """A worker answers."""

    name: str
    entry: dict[str, Any]
    """As the gateway's config names it."""
    pid: int
    node: str
    """The node's id in the cluster."""
    seconds: float


class Lost(Struct, tag="lost"):
    """A worker has ended, or its node has; it is started again."""

    name: str
    reason: str


class Waiting(Struct, tag="waiting"):
    """Nothing goes on for now, and why."""

    reason: str


class Fault(Struct, tag="fault"):
    """The process gives up."""

    reason: str


Message = Starting | Serving | Lost | Waiting | Fault
