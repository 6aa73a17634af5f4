"""How long answers are, learned from those that have ended: quantiles for each model. Pure.

A quantile is kept as one number that moves up or down with each answer (stochastic approximation in the logarithm), so
that nothing grows with traffic. What an answer has made so far shifts the estimate: it is at least that long.
"""

from __future__ import annotations

from math import exp, log, pow
from typing import Final

PRIOR_TOKENS: Final = 256.0
_QUANTILES: Final[tuple[float, ...]] = (0.25, 0.5, 0.75, 0.9)
_LEAST_STEP: Final = 0.02
_MOST_MODELS: Final = 1000
"""Names of models come from clients where workers serve any."""


class _Model:
    __slots__ = ("count", "length", "logs", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = PRIOR_TOKENS
        self.length = round(PRIOR_TOKENS)
        """The mean in whole tokens."""
        prior = log(PRIOR_TOKENS)
        self.logs = [prior - 0.7, prior, prior + 0.7, prior + 1.2]


class Lengths:
    """Answer lengths by model, in tokens."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def ended(self, model: str, tokens: int) -> None:
        """An answer was `tokens` long."""
        if tokens < 1:
            return
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= _MOST_MODELS:
                self._models.clear()
            found = self._models[model] = _Model()
        found.count += 1
        found.mean += (tokens - found.mean) * max(0.01, 1 / found.count)
        found.length = max(1, round(found.mean))
        value = log(float(tokens))
        # Steps shrink with experience but not to nothing: traffic changes.
        step = max(_LEAST_STEP, 1.0 / pow(float(found.count), 0.5))
        for place, quantile in enumerate(_QUANTILES):
            found.logs[place] += step * (quantile if value > found.logs[place] else quantile - 1.0)
        found.logs.sort()

    def quantile(self, model: str, share: float) -> float:
        """The length that `share` of the answers do not exceed, between the outermost that are kept."""
        found = self._models.get(model)
        logs = _Model().logs if found is None else found.logs
        if share <= _QUANTILES[0]:
            return exp(logs[0])
        for place in range(1, len(_QUANTILES)):
            if share <= _QUANTILES[place]:
                part = (share - _QUANTILES[place - 1]) / (_QUANTILES[place] - _QUANTILES[place - 1])
                return exp(logs[place - 1] + part * (logs[place] - logs[place - 1]))
        return exp(logs[-1])

    def expected(self, model: str, limit: int | None, made: int = 0) -> int:
        """Length of an answer that may have `limit` tokens and has `made` by now, in tokens."""
        found = self._models.get(model)
        length = round(PRIOR_TOKENS) if found is None else found.length
        if made:
            mean = PRIOR_TOKENS if found is None else found.mean
            length = max(1, round(made + max(1.0, 0.5 * mean) if made >= mean else mean))
        return length if limit is None else max(1, min(length, limit))
