"""The table and its JSON: one line a measurement, with the ratio that counts and what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_proxy.sim.report import table


@dataclass(frozen=True)
class Line:
    """`ours` and `beside` are rates or times on the clock. `ratio` compares them, more is better, `want` is its target.

    Where both ran in this process the ratio is that of CPU seconds, which neighbours on the machine disturb least.
    """

    what: str
    unit: str
    ours: float
    beside: float | None = None
    ratio: float | None = None
    want: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.want is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        return value <= self.want if self.unit == "s" else value >= self.want


def report(lines: Sequence[Line]) -> str:
    rows = [["", "unit", "ours", "beside", "ratio", "target", ""]]
    for line in lines:
        shown = [_number(x) for x in (line.ours, line.beside, line.ratio)]
        target = "" if line.want is None else ("<= " if line.unit == "s" else ">= ") + _number(line.want)
        rows.append([line.what, line.unit, *shown, target, "missed" if line.reached is False else ""])
    return table(rows)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
