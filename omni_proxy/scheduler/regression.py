"""A line through three features, learned online: recursive least squares with forgetting. Pure.

Work takes what it takes: nobody tells an engine's speed, and it changes. So each worker's cost is fitted from what it
was seen to take. Single observations may be nonsense (a restart, a compilation, a stall): those far from the line are
left out, unless they keep coming from one side, which means that the worker itself has changed.
"""

from __future__ import annotations

from typing import Final

Features = tuple[float, float, float]

_FORGETTING: Final = 0.995
"""Weight of an observation against the one after it: about the last 200 count."""
_PRIOR_VARIANCE: Final = 1e4
_MOST_VARIANCE: Final = 1e6
_OUTLIER: Final = 5.0
"""Times the usual error; what lies further off is left out."""
_CHANGED_AFTER: Final = 6
"""So many observations in a row that are left out on one side are the new truth."""
_SMOOTHING: Final = 0.05
_TRUSTED_AFTER: Final = 8
"""Before so many observations nothing counts as far off, as nobody knows what is usual."""


class Regression:
    """y = w · x with w >= 0. `scales` bring the features to about 1, `prior` is w before the first observation."""

    __slots__ = ("_cov", "_far", "_raw", "_scales", "error", "observations", "rejected", "weights")

    def __init__(self, scales: Features, prior: Features) -> None:
        self._scales = scales
        self.weights = prior
        """By the features as given; never negative."""
        self._raw = prior
        """What the regression works with: an early coefficient may be below zero until more is known."""
        self._cov = _diagonal(_PRIOR_VARIANCE)
        self._far = 0
        """Observations in a row that were left out: above the line counted up, below counted down."""
        self.error = 1.0
        """Usual distance of an observation from what was predicted, as a share of what was predicted."""
        self.observations = 0
        self.rejected = 0

    def predict(self, x: Features) -> float:
        """What the features should come to; never negative for features that are not."""
        w = self.weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2]

    def observe(self, x: Features, y: float) -> bool:
        """Learn that features came to `y`; False when that was left out."""
        if not 0.0 <= y < 1e6 or not _sane(x):
            self.rejected += 1
            return False
        predicted = self.predict(x)
        distance = max(y - predicted, predicted - y) / max(predicted, 1e-4)
        if self.observations >= _TRUSTED_AFTER and distance > max(_OUTLIER * self.error, 0.5):
            if not self._has_changed(y > predicted):
                self.rejected += 1
                return False
        elif self.observations >= _TRUSTED_AFTER:
            self._far = 0
        self.error += (min(distance, 2.0) - self.error) * max(_SMOOTHING, 1 / (self.observations + 1))
        self.observations += 1
        self._update(x, y, max(max(predicted, y), 1e-3))
        return True

    def _has_changed(self, above: bool) -> bool:
        """Count one more observation far off; True when there were so many that all that was learned is in doubt."""
        one = 1 if above else -1
        self._far = self._far + one if self._far * one > 0 else one
        if abs(self._far) < _CHANGED_AFTER:
            return False
        self._far = 0
        self._cov = _diagonal(_PRIOR_VARIANCE)
        self.observations = 0
        self.error = 1.0
        return True

    def _update(self, x: Features, y: float, size: float) -> None:
        """One step, with the observation weighted by its size: a short task must be met as well as a long one."""
        w0, w1, w2 = self._raw
        missed = y - (w0 * x[0] + w1 * x[1] + w2 * x[2])
        s0, s1, s2 = self._scales
        f0, f1, f2 = x[0] / s0 / size, x[1] / s1 / size, x[2] / s2 / size
        c00, c01, c02, c11, c12, c22 = self._cov
        g0 = c00 * f0 + c01 * f1 + c02 * f2
        g1 = c01 * f0 + c11 * f1 + c12 * f2
        g2 = c02 * f0 + c12 * f1 + c22 * f2
        gain = 1.0 / (_FORGETTING + f0 * g0 + f1 * g1 + f2 * g2)
        step = gain * missed / size
        self._raw = w0, w1, w2 = w0 + step * g0 / s0, w1 + step * g1 / s1, w2 + step * g2 / s2
        self.weights = max(0.0, w0), max(0.0, w1), max(0.0, w2)
        grow = 1.0 / _FORGETTING
        self._cov = (
            min(_MOST_VARIANCE, grow * (c00 - gain * g0 * g0)),
            grow * (c01 - gain * g0 * g1),
            grow * (c02 - gain * g0 * g2),
            min(_MOST_VARIANCE, grow * (c11 - gain * g1 * g1)),
            grow * (c12 - gain * g1 * g2),
            min(_MOST_VARIANCE, grow * (c22 - gain * g2 * g2)),
        )
        if c00 + c11 + c22 > _MOST_VARIANCE:
            # Features that no observation tells apart: what is not known must not grow for ever.
            self._cov = _diagonal(_PRIOR_VARIANCE)


def _sane(x: Features) -> bool:
    a, b, c = x
    return 0.0 <= a < 1e15 and 0.0 <= b < 1e15 and 0.0 <= c < 1e15 and a + b + c > 0.0


_Covariance = tuple[float, float, float, float, float, float]


def _diagonal(value: float) -> _Covariance:
    """Upper triangle of a 3 x 3 matrix."""
    return value, 0.0, 0.0, value, 0.0, value
