"""The config that is being put together: settings by path, workers, and a note for whatever did not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from omni_proxy.import_nginx.notes import Fate, Notes
from omni_proxy.import_nginx.syntax import Directive


class Draft:
    """Settings of the gateway are global: where two places of the nginx config differ, the first one is kept."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._data: dict[str, Any] = {}
        self._workers: list[dict[str, Any]] = []
        self._set_at: dict[str, str] = {}

    def set(self, path: str, value: object, directive: Directive, changed: str = "") -> None:
        """Set one setting. `changed` says what is different here."""
        where = self._set_at.get(path)
        *parents, last = path.split(".")
        data = self._data
        for parent in parents:
            data = data.setdefault(parent, {})
        if where not in (None, directive.where) and data[last] != value:
            reason = f"{path} is one for the whole gateway, and {where} was kept"
            self.notes.add(Fate.LOST, directive, reason)
            return
        data[last] = value
        self._set_at[path] = directive.where
        self.notes.add(Fate.CHANGED if changed else Fate.CARRIED, directive, changed)

    def convert(self, path: str, read: Callable[[str], object], directive: Directive) -> None:
        """Set one setting from a directive's first argument; a value that cannot be read is noted."""
        try:
            value = read(directive.value)
        except ValueError as exc:
            self.notes.add(Fate.LOST, directive, str(exc))
            return
        self.set(path, value, directive)

    def add_worker(self, stem: str, worker: dict[str, Any], directive: Directive) -> None:
        """Add a worker under a name made of its upstream's; one address is one worker."""
        twin = next((w["name"] for w in self._workers if w["url"] == worker["url"]), None)
        if twin is not None:
            self.notes.add(Fate.LOST, directive, f"the same address as worker {twin}")
            return
        taken = {w["name"] for w in self._workers}
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._") or "worker"
        numbers = (n for n in range(len(taken) + 1) if f"{stem}-{n}" not in taken)
        self._workers.append({"name": f"{stem}-{next(numbers)}", **worker})
        self.notes.add(Fate.CARRIED, directive, "")

    def data(self) -> dict[str, Any]:
        """What a config file of ours would hold."""
        order = ("listen", "processes", "limits", "timeouts", "keepalive", "retries", "access_log")
        settings = {key: self._data[key] for key in order if key in self._data}
        assert settings.keys() == self._data.keys()
        return {**settings, "workers": self._workers}
