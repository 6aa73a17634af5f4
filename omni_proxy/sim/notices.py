"""What a simulated worker tells. Pure."""

from __future__ import annotations

from enum import Enum, auto

from omni_proxy.sim.job import Job


class Notice(Enum):
    """What an engine tells of a job, at the instant at which it happens."""

    PULL = auto()
    """Room is taken for its KV: the transfer may begin."""
    PREFILLED = auto()
    """A P leg is computed; its KV is held until `release`."""
    FIRST = auto()
    """Its first token has been made."""
    TOKEN = auto()
    """One more token (only for an engine that tells every token)."""
    FINISHED = auto()
    """Its last token has been made (with `every_token`: after the notice for the token itself)."""


Notices = list[tuple[Notice, Job]]
