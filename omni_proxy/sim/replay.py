"""`omni-proxy replay`: a recorded event log against a fresh core. Equal, or the first difference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from omni_proxy.config import ConfigError
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Effect, Event
from omni_proxy.messages.wire import to_wire
from omni_proxy.observe.recorder import BadLog, LogReader

EXIT_DIFFERENT: Final = 1
MakeCore = Callable[[CoreSettings], Core]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step whose effects are not those of the log."""

    step: int
    now: float
    event: Event
    recorded: tuple[str, ...]
    replayed: tuple[str, ...]
    """Effects as JSON, from the first that differs on."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How a replay went. `cut`: the log ends in the middle of a frame."""

    steps: int
    seconds: float
    cut: bool
    difference: Difference | None


def replay(path: Path, make_core: MakeCore) -> Replay:
    """Feed a log to a fresh core. Raises BadLog and OSError."""
    reader = LogReader(path)
    core = make_core(reader.settings)
    steps, first, now = 0, None, 0.0
    for now, event, recorded in reader.frames():
        steps += 1
        first = now if first is None else first
        effects = core.handle(event, now)
        if effects != recorded:
            return Replay(steps, now - first, reader.cut, _difference(steps, now, event, recorded, effects))
    return Replay(steps, now - (first or 0.0), reader.cut, None)


def _difference(
    step: int, now: float, event: Event, recorded: Sequence[Effect], replayed: Sequence[Effect]
) -> Difference:
    same = next((i for i, (a, b) in enumerate(zip(recorded, replayed, strict=False)) if a != b), None)
    same = min(len(recorded), len(replayed)) if same is None else same
    return Difference(step, now, event, tuple(map(_text, recorded[same:])), tuple(map(_text, replayed[same:])))


def _text(message: Event | Effect) -> str:
    return msgspec.json.encode(to_wire(message)).decode()


def run_replay(options: argparse.Namespace, make_core: MakeCore, say: Callable[[str], None]) -> int:
    """The command: 0 equal, 1 different. Raises ConfigError for what is no log."""
    try:
        done = replay(options.file, make_core)
    except OSError as exc:
        raise ConfigError(f"{options.file}: {exc.strerror or exc}") from exc
    except BadLog as exc:
        raise ConfigError(f"{options.file}: {exc}") from exc
    if done.cut:
        say("The log ends in the middle of a step: whoever wrote it was ended.")
    if done.difference is None:
        say(f"Equal: {done.steps} steps over {done.seconds:.1f} s.")
        return 0
    say(_tell(done.difference))
    return EXIT_DIFFERENT


def _tell(found: Difference) -> str:
    lines = [f"Different at step {found.step}, at {found.now:.6f} s, on {_text(found.event)}"]
    for name, effects in (("recorded", found.recorded), ("replayed", found.replayed)):
        lines += [f"  {name}: {text}" for text in effects] or [f"  {name}: nothing more"]
    return "\n".join(lines)
