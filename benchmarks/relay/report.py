"""The table: medians by row and column, ratios to the better yardstick, reasons for every gap."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.relay.bench import DIRECT


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: the figures it shows, and what must be reached in ratio to peers."""

    title: str
    keys: tuple[str, ...]
    measurement: str
    digits: int = 0
    target: float | None = None
    added: bool = False  # shown less the figure of the direct row


COLUMNS: Final = (
    Column("request, 1 KB", ("request_1",), "request", target=0.5),
    Column("request, 32 KB", ("request_32",), "request", target=0.5),
    Column("token, 64 unpaced", ("unpaced_64",), "unpaced", digits=1, target=1.0),
    Column("tokens per read then", ("unpaced_bunch",), "unpaced", digits=1),
    Column("token, 64 / 256 paced", ("paced_64", "paced_256"), "paced", digits=1, target=0.8),
    Column(
        "added ms p50 / p99 at 100/s",
        ("latency_p50", "latency_p99"),
        "latency",
        digits=2,
        target=0.8,
        added=True,
    ),
    Column("RSS MB at 0 / 256 / 1,024 streams", ("rss_0", "rss_256", "rss_1024"), "rss"),
)
PROCESS_COLUMNS: Final = (
    Column("requests/s, 1 → 2", ("rps_1", "rps_2"), "processes"),
    Column("ratio", ("rps_ratio",), "processes", digits=2),
    Column("us/request, 1 → 2", ("cost_1", "cost_2"), "processes"),
    Column("ratio by CPU", ("rps_scale",), "processes", digits=2),
    Column("tokens/s of 51,200", ("many_rate",), "processes"),
    Column("token ms p50 / p99", ("many_token_p50", "many_token_p99"), "processes", digits=1),
    Column("TTFT ms p99, new", ("many_ttft_p99",), "processes"),
)


@dataclass
class Results:
    """Everything that was measured, by row and figure, and why something was not."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, row: str, figures: dict[str, float]) -> None:
        """Adds one repetition's figures."""
        for key, value in figures.items():
            self.samples.setdefault(row, {}).setdefault(key, []).append(value)

    def fail(self, row: str, measurement: str, reason: str) -> None:
        """Notes that a measurement (or, as `all`, the row) has failed; the first reason stays."""
        self.failures.setdefault(row, {}).setdefault(measurement, reason)

    def failure(self, row: str, measurement: str) -> str | None:
        """Why this row lacks the measurement, if it does."""
        reasons = self.failures.get(row, {})
        return reasons.get(measurement) or reasons.get("all")

    def median(self, row: str, key: str) -> float | None:
        """Median over the repetitions."""
        values = self.samples.get(row, {}).get(key)
        return statistics.median(values) if values else None

    def shown(self, row: str, column: Column, key: str) -> float | None:
        """The figure as the column shows it."""
        value = self.median(row, key)
        if value is None or not column.added or row == DIRECT:
            return value
        base = self.median(DIRECT, key)
        return None if base is None else value - base

    def as_json(self) -> dict[str, Any]:
        """All samples, for a file."""
        return {"samples": self.samples, "failures": self.failures}


def format_value(value: float, digits: int) -> str:
    """`1,234` or `0.42`."""
    return f"{value:,.{digits}f}"


def table(results: Results, rows: Sequence[str], columns: Sequence[Column]) -> str:
    """A table in Markdown; a cell without a figure says that it failed or was not asked for."""
    cells = [["gateway", *(column.title for column in columns)]]
    for row in rows:
        cells.append([row, *(_cell(results, row, column) for column in columns)])
    return markdown(cells)


def _cell(results: Results, row: str, column: Column) -> str:
    if results.failure(row, column.measurement):
        return "fails"
    values = [results.shown(row, column, key) for key in column.keys]
    if all(value is None for value in values):
        return "-"
    return " / ".join("-" if v is None else format_value(v, column.digits) for v in values)


def ratio_table(results: Results, rows: Sequence[str], yardsticks: Sequence[str], judged: str) -> str:
    """Each row's figures divided by the better yardstick's; targets for the judged row."""
    columns = [column for column in COLUMNS if column.target is not None]
    cells = [["ratio to the better Rust router", *(column.title for column in columns)]]
    for row in rows:
        if row != DIRECT:
            found = [_ratios(results, row, column, yardsticks) for column in columns]
            cells.append([row, *(_ratio_cell(ratios) for ratios in found)])
    cells.append([f"to reach: {judged}", *(f"≤ {column.target}" for column in columns)])
    verdicts = [_verdict(_ratios(results, judged, c, yardsticks), c.target) for c in columns]
    cells.append(["reached", *verdicts])
    return markdown(cells)


def _ratios(results: Results, row: str, column: Column, yardsticks: Sequence[str]) -> list[float | None]:
    return [_ratio(results, row, column, key, yardsticks) for key in column.keys]


def _ratio(results: Results, row: str, column: Column, key: str, yardsticks: Sequence[str]) -> float | None:
    value = results.shown(row, column, key)
    peers = [results.shown(peer, column, key) for peer in yardsticks]
    known = [peer for peer in peers if peer is not None and peer > 0]
    return None if value is None or not known else value / min(known)


def _ratio_cell(ratios: Sequence[float | None]) -> str:
    return " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def _verdict(ratios: Sequence[float | None], target: float | None) -> str:
    if target is None or any(ratio is None for ratio in ratios):
        return "-"
    return " / ".join("yes" if ratio <= target else "NO" for ratio in ratios if ratio is not None)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first as head, with columns padded for a terminal."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def failure_lines(results: Results) -> list[str]:
    """One line for everything that has no figure."""
    return [
        f"{row}, {measurement}: {reason}"
        for row, reasons in results.failures.items()
        for measurement, reason in reasons.items()
    ]
