"""What work costs on one worker, in seconds, as learned from what it took there. Pure.

    prefill   a · prompts + b · uncached tokens + c · pairs        pairs = uncached · (cached + uncached / 2)
    decode    a + b · sequences + c · KV tokens                    one step: a token for each sequence

A pair is a (query, key) of attention: `cached + uncached / 2` is the mean context of the tokens that are computed.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.scheduler.regression import Features, Regression

PREFILL_PRIOR: Final[Features] = (0.01, 50e-6, 2e-9)
"""A large model on one node of accelerators, within a factor of a few; the first prompts correct it."""
DECODE_PRIOR: Final[Features] = (0.015, 0.2e-3, 10e-9)
_PREFILL_SCALES: Final[Features] = (0.01, 1e-4, 1e-8)
_DECODE_SCALES: Final[Features] = (0.01, 1e-3, 1e-7)
"""How large a coefficient may well be: the regression works with coefficients divided by these."""


_OWN_AFTER: Final = 5
"""So many observations of its own make a worker's fit better than what is known of its peers."""

_SHARED_MASK: Final = 15
"""Every 16th observation of a worker, its first one included, is told to its peers."""


class _Cost:
    """A fit of one worker's own; until it has shown enough, that of its peers stands for it."""

    __slots__ = ("_peers", "fit")

    def __init__(self, scales: Features, prior: Features, peers: _Cost | None) -> None:
        self.fit = Regression(_inverse(scales), prior)
        self._peers = peers

    @property
    def weights(self) -> Features:
        """a, b and c."""
        if self._peers is None or self.fit.observations >= _OWN_AFTER:
            return self.fit.weights
        return self._peers.fit.weights

    def _learn(self, features: Features, seconds: float) -> bool:
        """Take an observation in, and tell the peers now and then; False when it is not believed."""
        if self._peers is not None and self.fit.observations & _SHARED_MASK == 0:
            self._peers.fit.observe(features, seconds)
        return self.fit.observe(features, seconds)


class PrefillCost(_Cost):
    """Seconds that a worker takes for prompts; until it has shown that, those that its peers take."""

    __slots__ = ()

    def __init__(self, peers: PrefillCost | None = None) -> None:
        super().__init__(_PREFILL_SCALES, PREFILL_PRIOR, peers)

    def seconds(self, uncached: int, cached: int) -> float:
        """One prompt of which `cached` tokens are there and `uncached` are not."""
        a, b, c = self.weights
        return a + uncached * (b + c * (cached + 0.5 * uncached))

    def added_s(self, uncached: int, cached: int) -> float:
        """By how much a prompt makes a pass longer that is made anyway: without its fixed cost."""
        return self.seconds(uncached, cached) - self.weights[0]

    def observe(self, prompts: int, uncached: int, pairs: float, seconds: float) -> bool:
        """Learn what some prompts took together; False when that is not believed."""
        return self._learn((float(prompts), float(uncached), pairs), seconds)


class DecodeCost(_Cost):
    """Seconds that a worker takes for one token of each of its sequences; at first those that its peers take."""

    __slots__ = ()

    def __init__(self, peers: DecodeCost | None = None) -> None:
        super().__init__(_DECODE_SCALES, DECODE_PRIOR, peers)

    def step_s(self, seqs: float, kv_tokens: float) -> float:
        """One step of so many sequences that have so many tokens of context together."""
        a, b, c = self.weights
        return a + b * seqs + c * kv_tokens

    def observe(self, seqs: float, kv_tokens: float, step_s: float) -> bool:
        """Learn what a step took on average; False when that is not believed."""
        return self._learn((1.0, seqs, kv_tokens), step_s)


def pairs(uncached: int, cached: int) -> float:
    """(query, key) pairs of causal attention of `uncached` tokens behind `cached` ones."""
    return uncached * (cached + 0.5 * uncached)


def _inverse(scales: Features) -> Features:
    return 1 / scales[0], 1 / scales[1], 1 / scales[2]
