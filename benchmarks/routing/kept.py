"""Results on disk: each is written as soon as it is there, and a run that is started again leaves out what it finds."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.routing.measure import Result
from omni_proxy.config import ConfigError

Key = tuple[str, float, int]


class _File(msgspec.Struct):
    conditions: dict[str, str]
    results: list[Result]


@dataclass(slots=True)
class Kept:
    """The results of one set of conditions. `path` None: in memory only."""

    path: Path | None
    conditions: Mapping[str, str]
    results: dict[Key, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path | None, conditions: Mapping[str, str]) -> "Kept":
        """What the file holds already. Raises ConfigError where it is of other conditions."""
        kept = cls(path, conditions)
        if path is None or not path.exists():
            return kept
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"{path}: holds no results of this benchmark ({exc})") from exc
        for name in sorted({*found.conditions, *conditions}):
            there, here = found.conditions.get(name), conditions.get(name)
            if there != here:
                raise ConfigError(f"{path}: holds results of another run: {name} was {there}, now it is {here}")
        kept.results = {key_of(result): result for result in found.results}
        return kept

    def has(self, key: Key) -> bool:
        """Was this measured, with figures?"""
        found = self.results.get(key)
        return found is not None and found.figures is not None

    def add(self, result: Result) -> None:
        """Keep a result, on disk before this returns."""
        self.results[key_of(result)] = result
        if self.path is None:
            return
        data = msgspec.json.encode(_File(dict(self.conditions), list(self.results.values())))
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        partial.write_bytes(msgspec.json.format(data, indent=1))
        partial.replace(self.path)


def key_of(result: Result) -> Key:
    """What tells results apart."""
    return result.gateway, result.load, result.seed
