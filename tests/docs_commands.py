"""The commands that documents show: found in their fenced blocks, their indented blocks and their inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(
        page
        for folder in ("docs", "benchmarks", "examples", "configs")
        for page in sorted((ROOT / folder).rglob("*.md"))
    ),
]
CONFIGS = [path for folder in ("configs", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
_INDENTED = re.compile(r"(?:^    \S.*\n?)+", re.M)
_INLINE = re.compile(r"`((?:omni-proxy|python -m|pytest|scripts/)[^`]*)`")
_SHELLS = {"", "sh", "bash", "console", "shell"}
_COMMENT = re.compile(r"^# +((?:omni-proxy|python -m|scripts/) ?.*)$", re.M)
_ENVIRONMENT = re.compile(r"^[A-Z][A-Z0-9_]*=\S*$")
_OURS = ("omni-proxy", "python", "pytest", "pip", "scripts/")


class Command(NamedTuple):
    """One command of a page, without shell around it. `whole`: it is meant to be run as it stands."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    """All commands of ours that a page shows."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    blocks = [match[3] for match in _BLOCK.finditer(text) if match[2] in _SHELLS]
    rest = _BLOCK.sub("", text)
    for block in (*blocks, *(match[0] for match in _INDENTED.finditer(rest))):
        for line in block.replace("\\\n", " ").splitlines():
            yield from _of_line(name, line.strip().removeprefix("$ "), whole=True)
    for inline in _INLINE.findall(rest):
        yield from _of_line(name, inline, whole=False)


def commands_in_comments(config: Path) -> Iterator[Command]:
    """Those that the comment of a config shows, each on a line of its own."""
    for line in _COMMENT.findall(config.read_text(encoding="utf-8")):
        yield from _of_line(str(config.relative_to(ROOT)), line, whole=True)


def _of_line(page: str, line: str, whole: bool) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that spans lines: another language, or a block that is no shell
        return
    for part in _split(words):
        while part and _ENVIRONMENT.match(part[0]):
            part = part[1:]
        if part and part[0].startswith(_OURS):
            yield Command(page, tuple(_without_marks(part)), whole)


def _split(words: list[str]) -> Iterator[list[str]]:
    """What stands between `&&`, `|`, `;` and `&`, up to a redirection."""
    part: list[str] = []
    for word in words:
        if word in ("&&", "|", ";", "&", "||"):
            yield part
            part = []
        elif word in (">", ">>", "2>", "<"):
            break
        else:
            part.append(word)
    yield part


def _without_marks(words: list[str]) -> Iterator[str]:
    """Without the marks of documents: `[--optional]`, `and so on ...`."""
    for word in words:
        if word in ("...", "…"):
            continue
        yield word.removesuffix("...") if not word.startswith("[") else word.strip("[]")
