"""Pieces of text with a look, and numbers as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Style(Enum):
    """How a piece of text looks."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


Piece = tuple[str, Style]
Line = list[Piece]


def clean(text: str) -> str:
    """Without anything that a terminal might obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def plain(lines: Iterable[Line]) -> str:
    """Without looks."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines) + "\n"


def length(line: Line) -> int:
    """Characters of a line."""
    return sum(len(text) for text, _ in line)


def cut(line: Line, width: int) -> Line:
    """As much of a line as has room."""
    found: Line = []
    for text, style in line:
        found.append((text[:width], style))
        width -= len(text)
        if width <= 0:
            break
    return found


def bar(part: float, whole: float | None, width: int, style: Style) -> Line:
    """A part of a whole; blank where the whole is not known."""
    if not whole:
        return [(" " * width, Style.PLAIN)]
    filled = min(width, round(part / whole * width)) or (1 if part else 0)
    return [("█" * filled, style), ("░" * (width - filled), Style.DIM)]


def seconds(value: float | None) -> str:
    """A length of time."""
    if value is None:
        return "-"
    if value < 0.0095:
        return f"{value * 1000:.1f} ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def count(value: float) -> str:
    """A number, shortened above ten thousand."""
    if value < 10_000:
        return str(round(value))
    if value < 999_500:
        return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"
    return f"{value / 1e6:.1f}M"
