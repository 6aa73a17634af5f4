"""The links of simulated workers, over which KV moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.sim.engine_model import EngineModel


class Links:
    """One link for each worker; it carries one transfer after another."""

    def __init__(self, models: Sequence[EngineModel]) -> None:
        self._models = models
        self._free_at = [0.0 for _ in models]

    def arrives_at(self, source: int, target: int, tokens: int, now: float) -> float:
        """Begin to move so many tokens' KV as soon as both links are free; the instant at which all of it is there."""
        model = self._models[target]
        free_at = max(now, self._free_at[source], self._free_at[target]) + model.transfer_s(tokens)
        self._free_at[source] = self._free_at[target] = free_at
        return free_at + model.link_s
