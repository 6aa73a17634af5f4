"""What became of each directive, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from omni_proxy.import_nginx.syntax import Directive


class Fate(StrEnum):
    """What became of a directive; the values are the headings of the report."""

    CARRIED = "Carried over"
    CHANGED = "Carried over with another meaning, or replaced"
    UNNEEDED = "Not needed here"
    LOST = "NOT carried over"


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the report."""

    fate: Fate
    where: str
    text: str
    reason: str


class Notes:
    """The notes in the order of the translation; each directive gets one of each fate at most."""

    def __init__(self) -> None:
        self._notes: dict[tuple[Fate, str, str], Note] = {}

    def add(self, fate: Fate, directive: Directive, reason: str, text: str | None = None) -> None:
        """`text` names a part of the directive where the rest has another fate."""
        note = Note(fate, directive.where, text or directive.text, reason)
        self._notes.setdefault((fate, note.where, note.text), note)

    def add_missing(self, sentence: str) -> None:
        """A file that is included and not there."""
        where, _, reason = sentence.partition(": ")
        self._notes.setdefault((Fate.LOST, where, "include"), Note(Fate.LOST, where, "include", reason))

    def of(self, fate: Fate) -> list[Note]:
        return [note for note in self._notes.values() if note.fate is fate]

    def report(self) -> Iterator[str]:
        """Lines of text: how much was carried over, then the rest one by one."""
        yield f"{Fate.CARRIED}: {len(self.of(Fate.CARRIED))} directives."
        for fate in (Fate.CHANGED, Fate.UNNEEDED, Fate.LOST):
            notes = self.of(fate)
            if notes:
                yield ""
                yield f"{fate}:"
                yield from (f"  {note.where}: {note.text}: {note.reason}" for note in notes)
