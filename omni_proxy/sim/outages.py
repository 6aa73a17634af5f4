"""Workers that die and come back in a simulated world: when, how the gateway learns it, what it did to requests. Pure.

A worker that dies loses its cache and everything that runs on it, and refuses connections. The gateway learns it from
legs that break at once, and from its probes a little later, as live (`health` in its config).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from msgspec import Struct

from omni_proxy.config import ConfigError
from omni_proxy.messages import RequestRecord
from omni_proxy.sim.figures import Spread, latency, spread


class Outage(Struct, frozen=True):
    """One worker is dead from one instant to another, in seconds of the run. `end` None: for good."""

    worker: str
    begin: float
    end: float | None

    def covers(self, at: float) -> bool:
        return self.begin <= at < (inf if self.end is None else self.end)


@dataclass(frozen=True, slots=True)
class OutagePlan:
    """All outages of a run, and how fast a gateway finds out."""

    outages: tuple[Outage, ...] = ()
    down_after_s: float = 1.5
    """From a worker's death until probes have shown it: two, a second apart, the first half a second later."""
    up_after_s: float = 0.1
    """From its return until a probe finds it: those that are down are asked more often."""
    resume: bool = False
    """Answers that broke are continued elsewhere from their tokens (`resume` in the config)."""


def parse_outage(text: str) -> Outage:
    """`NAME@FROM-TO`, or `NAME@FROM` for good. Raises ConfigError."""
    name, _, span = text.rpartition("@")
    begin_text, dash, end_text = span.partition("-")
    begin, end = _seconds(begin_text), _seconds(end_text) if dash else None
    if not name or begin is None or (dash and (end is None or end <= begin)):
        raise ConfigError(f"--outage: must be NAME@FROM-TO in seconds, FROM before TO, or NAME@FROM, got {text!r}")
    return Outage(name, begin, end)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < inf else None


def random_outages(text: str, names: Sequence[str], span_s: float, seed: int) -> list[Outage]:
    """`every=S,down=S`: each worker dies after S seconds on average, and is back after S. Raises ConfigError."""
    values = {"every": 600.0, "down": 60.0}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in values:
            raise ConfigError(f"--outages: there is no setting {key!r}; known are {', '.join(values)}")
        seconds = _seconds(value)
        if not seconds:
            raise ConfigError(f"--outages: {key}: must be a number of seconds above 0, got {value!r}")
        values[key] = seconds
    chance = random.Random(f"outages {seed}")
    found = []
    for name in names:
        at = chance.expovariate(1 / values["every"])
        while at < span_s:
            back = at + chance.expovariate(1 / values["down"])
            found.append(Outage(name, at, back))
            at = back + chance.expovariate(1 / values["every"])
    return found


def checked(outages: Iterable[Outage], names: Sequence[str]) -> tuple[Outage, ...]:
    """In order of time. Raises ConfigError for a worker that is not there, or that would die while it is dead."""
    ordered = sorted(outages, key=lambda outage: (outage.begin, outage.worker))
    until: dict[str, float] = {}
    for outage in ordered:
        if outage.worker not in names:
            raise ConfigError(f"--outage: there is no worker {outage.worker!r}; known are {', '.join(names)}")
        if outage.begin < until.get(outage.worker, 0.0):
            raise ConfigError(f"--outage: {outage.worker} is down already at {outage.begin:g} s")
        until[outage.worker] = inf if outage.end is None else outage.end
    return tuple(ordered)


# ------------------------------------------------------------------------------------------------ figures


class OutageFigures(Struct, frozen=True):
    """What became of requests that an outage may have touched, beside all others."""

    touched: int
    """Requests that lived, at least in part, while a worker was down."""
    retried: int
    """Of all requests: those of which a leg was sent more than once."""
    resumed: int
    """Answers that were continued by another worker."""
    failed: int
    """Requests that ended without a whole answer."""
    ttft_during: Spread | None
    """Of requests that arrived while a worker was down."""
    ttft_else: Spread | None


def outage_figures(outages: Sequence[Outage], records: Sequence[RequestRecord]) -> OutageFigures:
    """The figures of a run with outages."""
    during, beside = [], []
    touched = failed = 0
    for record in records:
        begin, end = record.arrived_at, record.ended_at or inf
        touched += any(o.begin <= end and (o.end is None or o.end >= begin) for o in outages)
        found = latency(record)
        if found is None:
            failed += 1
        elif any(outage.covers(begin) for outage in outages):
            during.append(found.ttft)
        else:
            beside.append(found.ttft)
    retried = sum(len(r.placements) > len({placement.leg for placement in r.placements}) for r in records)
    resumed = sum(bool(record.resumes) for record in records)
    return OutageFigures(touched, retried, resumed, failed, spread(during), spread(beside))
