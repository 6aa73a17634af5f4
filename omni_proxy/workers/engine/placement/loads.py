"""Expert loads: tokens per layer and expert in one window. Checks them and reads them from files.

A file is `.npy` (layers × experts, or windows × layers × experts), `.json` (a list of rows; an object from layer number
to row; or either under the key "loads") or `.csv` (columns layer, expert, tokens).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError

Loads = NDArray[np.float64]


def checked(values: object, layers: int | None = None) -> Loads:
    """Loads as float64 [layers, experts], or a named error that says which layer is at fault."""
    loads = _as_array(values)
    if loads.ndim != 2 or 0 in loads.shape:
        raise PlacementError(Fault.LOADS_SHAPE, f"loads must be layers by experts, got shape {loads.shape}")
    if layers is not None and len(loads) != layers:
        raise PlacementError(Fault.LAYERS_MISSING, f"{layers} layers expected, the loads have {len(loads)}")
    _refuse(~np.asarray(np.isfinite(loads).all(axis=1)), Fault.LOADS_NOT_FINITE, "NaN or infinite load")
    _refuse(np.asarray((loads < 0).any(axis=1)), Fault.LOADS_NEGATIVE, "negative load")
    _refuse(np.asarray(loads.sum(axis=1) <= 0), Fault.LAYER_WITHOUT_LOAD, "no tokens at all")
    return loads


def checked_windows(values: object, layers: int | None = None) -> NDArray[np.float64]:
    """Loads as float64 [windows, layers, experts]; a two-dimensional input is one window."""
    loads = _as_array(values)
    if loads.ndim == 2:
        loads = loads[None]
    if loads.ndim != 3 or not len(loads):
        raise PlacementError(Fault.LOADS_SHAPE, f"loads must have two or three dimensions, got shape {loads.shape}")
    return np.stack([checked(window, layers) for window in loads])


def read_windows(path: Path, layers: int | None = None) -> NDArray[np.float64]:
    """The windows in a file, oldest first; see the module for the formats."""
    readers = {".npy": _read_npy, ".json": _read_json, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PlacementError(Fault.LOADS_UNREADABLE, f"{path}: unknown kind of file, use .npy, .json or .csv")
    try:
        values = reader(path)
    except PlacementError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise PlacementError(Fault.LOADS_UNREADABLE, f"{path}: {exc}") from exc
    return checked_windows(values, layers)


def _as_array(values: object) -> NDArray[np.float64]:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise PlacementError(Fault.LOADS_SHAPE, f"rows of unequal length or not numbers ({exc})") from exc


def _refuse(bad: NDArray[np.bool_], fault: Fault, what: str) -> None:
    if bad.any():
        raise PlacementError(fault, f"layer {int(bad.argmax())}: {what}")


def _read_npy(path: Path) -> object:
    return np.load(path, allow_pickle=False)


def _read_json(path: Path) -> object:
    values: Any = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values, Mapping) and "loads" in values:
        values = values["loads"]
    if isinstance(values, Mapping):
        return _by_layer({int(layer): row for layer, row in values.items()})
    return values


def _read_csv(path: Path) -> object:
    cells: dict[int, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            cells.setdefault(int(row["layer"]), {})[int(row["expert"])] = float(row["tokens"])
    experts = 1 + max((max(row) for row in cells.values()), default=-1)
    return _by_layer({layer: [row.get(e, 0.0) for e in range(experts)] for layer, row in cells.items()})


def _by_layer(rows: Mapping[int, Sequence[float]]) -> list[Sequence[float]]:
    missing = sorted(set(range(max(rows, default=-1) + 1)) - set(rows))
    if missing:
        raise PlacementError(Fault.LAYERS_MISSING, f"no loads for layer {', '.join(map(str, missing[:8]))}")
    return [rows[layer] for layer in range(len(rows))]
