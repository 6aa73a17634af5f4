"""`omni-proxy place`: reads loads, places, compares before and after, writes what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.forecast import Forecast, deviation
from omni_proxy.workers.engine.placement.loads import Loads, read_windows
from omni_proxy.workers.engine.placement.match import renamed_alike
from omni_proxy.workers.engine.placement.moves import MoveOptions, improved
from omni_proxy.workers.engine.placement.place import Memory, Options, place, redundancy_of
from omni_proxy.workers.engine.placement.plan import Placement, contiguous, from_json
from omni_proxy.workers.engine.placement.report import Comparison, heat_page, table
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """The command line, parsed. Either `redundancy` or `slots` may be given; neither means no redundancy."""

    loads: Path
    ranks: int
    redundancy: int | None = None
    slots: int | None = None
    nodes: int = 1
    groups: int = 1
    layers: int | None = None
    split: str = "even"
    memory: str = "fixed"
    start: Path | None = None
    max_moves: int | None = None
    expert_bytes: int | None = None
    out: Path | None = None
    pattern: Path | None = None
    heatmap: Path | None = None


def run_place(options: PlaceOptions, say: Callable[[str], None]) -> int:
    """Place, say the table, write the files; raises PlacementError."""
    windows = read_windows(options.loads, options.layers)
    fitted, judged = _fitted(windows)
    before = _start(options, fitted)
    after = _placed(options, fitted, before, deviation(windows[:-1]))
    comparison = Comparison(judged, before, after, len(windows) > 1, options.start is not None, options.expert_bytes)
    say(table(comparison))
    if options.out is not None:
        _write(options.out, after.to_json().encode())
    if options.heatmap is not None:
        _write(options.heatmap, heat_page(comparison).encode())
    if options.pattern is not None:
        _write_pattern(options.pattern, after)
    return 0


def _fitted(windows: Loads) -> tuple[Loads, Loads]:
    """What to place for, and the window to judge by: the last one, which is not fitted when there are several."""
    if len(windows) == 1:
        return windows[0], windows[0]
    forecast = Forecast()
    expected = windows[0]
    for window in windows[:-1]:
        expected = forecast.observe(window)
    return expected, windows[-1]


def _start(options: PlaceOptions, loads: Loads) -> Placement:
    if options.start is None:
        return contiguous(loads.shape[0], loads.shape[1], options.ranks)
    try:
        placement = from_json(options.start.read_text(encoding="utf-8"))
    except OSError as exc:
        raise PlacementError(Fault.BAD_PLACEMENT, f"{options.start}: {exc}") from exc
    if (placement.layers, placement.experts, placement.ranks) != (*loads.shape, options.ranks):
        raise PlacementError(
            Fault.BAD_PLACEMENT,
            f"{options.start} has {placement.layers} layers, {placement.experts} experts and {placement.ranks} ranks;"
            f" asked for {loads.shape[0]}, {loads.shape[1]} and {options.ranks}",
        )
    return placement


def _placed(options: PlaceOptions, loads: Loads, before: Placement, noise: float) -> Placement:
    topology = Topology(options.ranks, options.nodes, options.groups)
    if options.max_moves is not None:
        return _moved(options, loads, before)
    redundancy = options.redundancy or 0
    if options.slots is not None:
        redundancy = redundancy_of(options.slots, options.ranks, loads.shape[1])
    after = place(loads, topology, Options(redundancy, Split(options.split), Memory(options.memory), noise))
    return after if options.start is None else renamed_alike(before, after)


def _moved(options: PlaceOptions, loads: Loads, before: Placement) -> Placement:
    if options.start is None:
        raise PlacementError(Fault.BAD_OPTION, "--max-moves needs the placement to start from (--from)")
    return improved(before, loads, MoveOptions(options.max_moves or 0, Split(options.split)))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise PlacementError(Fault.BAD_OPTION, f"cannot write {path}: {exc}") from exc


def _write_pattern(path: Path, placement: Placement) -> None:
    try:
        with path.open("wb") as file:
            np.save(file, placement.pattern())
    except OSError as exc:
        raise PlacementError(Fault.BAD_OPTION, f"cannot write {path}: {exc}") from exc
