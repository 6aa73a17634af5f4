"""Instants that may be missing: None is never. Pure."""

from __future__ import annotations


def sooner(one: float | None, other: float | None) -> float | None:
    """The first of two."""
    if one is None:
        return other
    return one if other is None or one <= other else other
