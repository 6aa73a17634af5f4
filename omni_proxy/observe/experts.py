"""Expert load at the gateway as metrics and as JSON for the heat map. What is known comes from `expert_loads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_proxy.observe.expert_loads import ExpertLoad

MOST_SERIES: Final = 4096
"""A worker with more pairs of layer and expert has no `omni_expert_tokens` here: its own /metrics has them."""


class ExpertMetrics(Collector):
    """Reads at each scrape."""

    def __init__(self, loads: Callable[[], Sequence[ExpertLoad]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        tokens = CounterMetricFamily(
            "omni_expert_tokens", "Rows that the router sent to each expert.", labels=("worker", "layer", "expert")
        )
        imbalance = GaugeMetricFamily(
            "omni_expert_imbalance",
            "Largest over mean rows in the last window, mean over layers; 1 is perfect.",
            labels=("worker", "over"),
        )
        layers = GaugeMetricFamily(
            "omni_expert_layer_imbalance",
            "Largest over mean rows per expert in the last window.",
            labels=("worker", "layer"),
        )
        idle = GaugeMetricFamily(
            "omni_expert_idle", "Pairs of layer and expert without a row in the last window.", labels=("worker",)
        )
        for load in self._loads():
            if sum(map(len, load.total)) <= MOST_SERIES:
                _add_tokens(tokens, load)
            for over, ratio in (("experts", load.imbalance if load.closed else None), ("ranks", load.rank_imbalance)):
                if ratio is not None:
                    imbalance.add_metric((load.worker, over), ratio)
            if load.closed:
                idle.add_metric((load.worker,), load.idle)
                for layer, ratio in enumerate(load.imbalances):
                    if ratio is not None:
                        layers.add_metric((load.worker, str(layer)), ratio)
        yield from (tokens, imbalance, layers, idle)


def _add_tokens(family: CounterMetricFamily, load: ExpertLoad) -> None:
    for layer, experts in enumerate(load.total):
        for expert, count in enumerate(experts):
            family.add_metric((load.worker, str(layer), str(expert)), count)


def experts_json(loads: Sequence[ExpertLoad], wall_offset: float) -> dict[str, object]:
    """As `/omni/experts` shows them. `wall_offset`: wall clock minus the core's clock, seconds."""
    return {
        "workers": [
            {
                "worker": load.worker,
                "at": round(load.at + wall_offset, 3),
                "window_s": None if load.window_s is None else round(load.window_s, 3),
                "closed": load.closed,
                "imbalance": load.imbalance,
                "rank_imbalance": load.rank_imbalance,
                "idle": load.idle,
                "layers": [
                    {"layer": number, "imbalance": ratio, "tokens": rows}
                    for number, (rows, ratio) in enumerate(zip(load.tokens, load.imbalances, strict=True))
                    if ratio is not None
                ],
                "layer_rank_imbalance": load.ranks,
            }
            for load in loads
        ]
    }
