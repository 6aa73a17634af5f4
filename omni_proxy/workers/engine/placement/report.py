"""Before and after, per layer, as text and as a page with heat maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omni_proxy.workers.engine.placement.draft import Floats
from omni_proxy.workers.engine.placement.heatmap import Map, page
from omni_proxy.workers.engine.placement.loads import Loads
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.score import Score, scored


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two placements under the same window.

    `next_window`: the window is not the one that was fitted. `running`: `before` is what is served now, so what is not
    yet in its place must be copied.
    """

    loads: Loads
    before: Placement
    after: Placement
    next_window: bool
    running: bool = False
    expert_bytes: int | None = None

    def scores(self) -> tuple[Score, Score]:
        return scored(self.before, self.loads), scored(self.after, self.loads, self.before if self.running else None)


def table(comparison: Comparison) -> str:
    """One line per layer, then the sums."""
    before, after = comparison.scores()
    copies = comparison.after.copies()
    lines = ["layer   before    after    bound  replicas  most copies  copied"]
    for layer in range(comparison.after.layers):
        lines.append(
            f"{layer:5d} {before.imbalance[layer]:8.3f} {after.imbalance[layer]:8.3f} {after.bound[layer]:8.3f}"
            f" {copies[layer].sum():9d} {copies[layer].max():12d} {after.copied[layer]:7d}"
        )
    return "\n".join([*lines, *summary(comparison)])


def summary(comparison: Comparison) -> list[str]:
    """What the whole model gains and what it costs."""
    before, after = comparison.scores()
    held = comparison.after.slots_used()
    window = "the next window" if comparison.next_window else "the window that was fitted"
    moved = f"{int(after.copied.sum())} experts to copy" if comparison.running else "nothing runs yet (--from)"
    if comparison.running and comparison.expert_bytes is not None:
        moved += f", {after.copied_bytes(comparison.expert_bytes) / 1e9:.3f} GB"
    return [
        f"max/mean rank load over {window}: before {before.mean():.3f}, after {after.mean():.3f},"
        f" lower bound {float(after.bound.mean()):.3f}",
        f"sum of largest loads / sum of means: before {before.peak_share:.3f}, after {after.peak_share:.3f}",
        f"{moved}; each rank holds {held.min()} to {held.max()} experts in {comparison.after.layers} layers",
    ]


def heat_page(comparison: Comparison) -> str:
    """The HTML page of a comparison."""
    maps = [
        Map("Before", "ranks", _ratios(comparison.before.rank_loads(comparison.loads))),
        Map("After", "ranks", _ratios(comparison.after.rank_loads(comparison.loads))),
        Map("Expert loads", "experts", _ratios(comparison.loads)),
        Map("Copies (ratio to the mean)", "experts", _ratios(comparison.after.copies().astype(np.float64))),
    ]
    return page("Expert placement", summary(comparison), maps)


def _ratios(values: Floats) -> Floats:
    return np.asarray(values / values.mean(axis=1, keepdims=True), dtype=np.float64)
