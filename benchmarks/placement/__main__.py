"""`python -m benchmarks.placement`: all tables, and the figures as JSON with --out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.placement import drift, redundancy, static, steering
from benchmarks.placement.loads import LAYERS
from omni_proxy.workers.engine.placement.shares import Split


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers of the static tables (default {LAYERS})")
    parser.add_argument("--drift-layers", type=int, default=16, help="layers of the drift table (default 16)")
    parser.add_argument("--windows", type=int, default=200, help="windows of the drift table (default 200)")
    parser.add_argument("--steps", type=int, default=8000, help="steps of the steering table (default 8000)")
    parser.add_argument("--steering", action="store_true", help="only the steering table")
    parser.add_argument("--out", type=Path, default=None, help="write all figures as JSON")
    options = parser.parse_args()
    figures = {"steering": steering_table(options.steps)} if options.steering else all_tables(options)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def all_tables(options: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    return {
        "global": static_table("Global policy", static.rows(options.layers)),
        "hierarchical": static_table("Hierarchical policy, 8 groups", static.hierarchical_rows(options.layers)),
        "redundancy": redundancy_table(options.layers),
        "drift": drift_table(options.drift_layers, options.windows),
        "steering": steering_table(options.steps),
    }


def static_table(title: str, rows: Iterable[static.Row]) -> list[dict[str, object]]:
    names = [f"{memory.value} {split.value}" for split, memory in static.FORMS]
    print(f"\n{title}: max/mean rank load, mean over layers, on the fitted window; CPU seconds for all layers")
    print("ranks extra nodes  zipf  unplaced published " + " ".join(f"{name:>26}" for name in names) + "  bound pooled")
    kept = []
    for row in rows:
        cells = " ".join(f"{row.ours[name]:9.4f} {row.cpu_s[name]:5.2f} s, {row.most_held[name]:4d}" for name in names)
        head = f"{row.ranks:5d} {row.redundancy:5d} {row.nodes:5d} {row.exponent:5.1f}"
        print(
            f"{head} {row.unplaced:9.3f} {row.public:9.4f} {cells}    {row.bound:.4f} {row.pooled_bound:.4f}",
            flush=True,
        )
        kept.append(asdict(row))
    print("(last number of a form: most experts on a rank, all layers together)")
    next_table(kept)
    return kept


def next_table(kept: list[dict[str, object]]) -> None:
    """The same placements in the window after the one they were made for."""
    names = [f"{memory.value} {split.value}" for split, memory in static.FORMS]
    print("\nThe same in the NEXT window under slow drift, placed for a forecast: max/mean, mean over layers")
    print("ranks extra  zipf published " + " ".join(f"{name:>18}" for name in names))
    for row in kept:
        ours = row["next_ours"]
        assert isinstance(ours, dict)
        cells = " ".join(f"{ours[name]:18.3f}" for name in names)
        print(f"{row['ranks']:5d} {row['redundancy']:5d} {row['exponent']:5.1f} {row['next_public']:9.3f} {cells}")


def redundancy_table(layers: int) -> list[dict[str, object]]:
    print(
        f"\nNon-uniform redundancy, {redundancy.RANKS} ranks, exponents 0.1 to 1: sum of largest loads / sum of means"
    )
    kept = []
    for split in Split:
        for budget in redundancy.budgets(split, layers):
            print(
                f"{split.value:>13} budget {budget.fraction:5.3f} of one slot per rank and layer:"
                f" {budget.slots_per_rank:4d} experts on a rank, {budget.peak_share:.3f}, keeps {budget.gain_kept:.1%}",
                flush=True,
            )
            kept.append({"split": split.value, **asdict(budget)})
    return kept


def drift_table(layers: int, count: int) -> list[dict[str, object]]:
    print(f"\nDrift: max/mean in the NEXT window, {drift.RANKS} ranks + {drift.REDUNDANCY} slots, {count} windows")
    kept = []
    for result in drift.results(layers, count):
        print(
            f"{result.drift:>5} zipf {result.exponent} {result.policy:<28} {result.next_window:.3f} (bound"
            f" {result.bound:.3f}) {result.copied:6.2f} experts copied a layer and window, {result.cpu_ms:6.1f} ms CPU",
            flush=True,
        )
        kept.append(asdict(result))
    return kept


def steering_table(steps: int) -> list[dict[str, object]]:
    print(
        f"\nSteering by expert profile: {steering.WORKERS} workers of {steering.RANKS} ranks,"
        f" {steering.CLASSES} classes of requests, {steps} steps"
    )
    kept = []
    for result in steering.results(steps):
        where = "live re-placement" if result.live else "fixed placement"
        print(
            f"own experts {result.own:.0%}, {where:<17} {result.policy:<24} max/mean {result.imbalance:.3f},"
            f" step {result.step:5.1f}, tokens by time over plain's "
            + " ".join(f"{rate:.3f}" for rate in result.rates),
            flush=True,
        )
        kept.append(asdict(result))
    return kept


if __name__ == "__main__":
    main()
