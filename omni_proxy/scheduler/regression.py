"""A line through three features, learned online: recursive least squares with forgetting, none below zero. Pure.

Work takes what it takes: nobody tells an engine's speed, and it changes. So each worker's cost is fitted from what it
was seen to take. Single observations may be nonsense (a restart, a compilation, a stall): those far from the line are
left out, unless they keep coming from one side, which means that the worker itself has changed.
"""

from __future__ import annotations

from typing import Final

Features = tuple[float, float, float]
_Symmetric = tuple[float, float, float, float, float, float]
"""Upper triangle of a 3 x 3 matrix."""

_FORGETTING: Final = 0.995
"""Weight of an observation against the one after it: about the last 200 count."""
_RIDGE: Final = 1e-4
"""Weight of what was thought before, against an observation: it counts only where observations do not tell."""
_LEAST_RIDGE: Final = 1e-12
"""The same as a share of what was observed: below this, numbers of 64 bits do not tell."""
_OUTLIER: Final = 5.0
"""Times the usual error; what lies further off is left out."""
_CHANGED_AFTER: Final = 6
"""So many observations in a row that are left out on one side are the new truth."""
_SMOOTHING: Final = 0.05
_TRUSTED_AFTER: Final = 8
"""Before so many observations nothing counts as far off, as nobody knows what is usual."""


class Regression:
    """y = w · x with w >= 0. `scales` bring the features to about 1, `prior` is w before the first observation."""

    __slots__ = (
        "_before",
        "_far",
        "_moment",
        "_scales",
        "_squares",
        "error",
        "observations",
        "rejected",
        "weights",
    )

    def __init__(self, scales: Features, prior: Features) -> None:
        self._scales = scales
        self.weights = prior
        """By the features as given; never negative."""
        self._begin()
        self._far = 0
        """Observations in a row that were left out: above the line counted up, below counted down."""
        self.error = 1.0
        """Usual distance of an observation from what was predicted, as a share of what was predicted."""
        self.observations = 0
        self.rejected = 0

    def _begin(self) -> None:
        self._before = self.weights
        """What was thought before the first observation that counts."""
        self._squares: _Symmetric = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Sum of x x' over the observations, scaled."""
        self._moment: Features = (0.0, 0.0, 0.0)
        """Sum of x y over the observations, scaled."""

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
        self._begin()
        self.observations = 0
        self.error = 1.0
        return True

    def _update(self, x: Features, y: float, size: float) -> None:
        """One step, with the observation weighted by its size: a short task must be met as well as a long one."""
        s0, s1, s2 = self._scales
        f0, f1, f2, z, keep = x[0] / s0 / size, x[1] / s1 / size, x[2] / s2 / size, y / size, _FORGETTING
        a00, a01, a02, a11, a12, a22 = self._squares
        b0, b1, b2 = self._moment
        self._squares = (
            keep * a00 + f0 * f0,
            keep * a01 + f0 * f1,
            keep * a02 + f0 * f2,
            keep * a11 + f1 * f1,
            keep * a12 + f1 * f2,
            keep * a22 + f2 * f2,
        )
        self._moment = keep * b0 + f0 * z, keep * b1 + f1 * z, keep * b2 + f2 * z
        self._fit()

    def _fit(self) -> None:
        """The best coefficients of which none is below zero.

        Tasks that are much alike are met by many lines, some with coefficients below zero. Such a line with these just
        cut off misses all those tasks: so what is below zero is left out, and the others are fitted again.
        """
        s0, s1, s2 = self._scales
        p0, p1, p2 = self._before
        a00, a01, a02, a11, a12, a22 = self._squares
        b0, b1, b2 = self._moment
        ridge = max(_RIDGE, _LEAST_RIDGE * (a00 + a11 + a22))
        squares = a00 + ridge, a01, a02, a11 + ridge, a12, a22 + ridge
        moment = b0 + ridge * p0 * s0, b1 + ridge * p1 * s1, b2 + ridge * p2 * s2
        w = _solved(squares, moment, ridge)
        for _ in range(3):
            low = min(w)
            if low >= 0.0:
                break
            squares, moment = _without(squares, moment, w.index(low))
            w = _solved(squares, moment, ridge)
        w0, w1, w2 = w
        self.weights = max(0.0, w0) / s0, max(0.0, w1) / s1, max(0.0, w2) / s2


def _sane(x: Features) -> bool:
    a, b, c = x
    return 0.0 <= a < 1e15 and 0.0 <= b < 1e15 and 0.0 <= c < 1e15 and a + b + c > 0.0


def _solved(a: _Symmetric, b: Features, least: float) -> Features:
    """w of a w = b, by elimination; a is positive, by `least` at least, however sums were rounded."""
    a00, a01, a02, a11, a12, a22 = a
    b0, b1, b2 = b
    l1, l2 = a01 / a00, a02 / a00
    d1, e = max(least, a11 - l1 * a01), a12 - l1 * a02
    l3 = e / d1
    d2 = max(least, a22 - l2 * a02 - l3 * e)
    y1 = b1 - l1 * b0
    w2 = (b2 - l2 * b0 - l3 * y1) / d2
    w1 = y1 / d1 - l3 * w2
    return b0 / a00 - l1 * w1 - l2 * w2, w1, w2


def _without(a: _Symmetric, b: Features, place: int) -> tuple[_Symmetric, Features]:
    """The equations with one coefficient held at zero."""
    a00, a01, a02, a11, a12, a22 = a
    b0, b1, b2 = b
    if place == 0:
        return (1.0, 0.0, 0.0, a11, a12, a22), (0.0, b1, b2)
    if place == 1:
        return (a00, 0.0, a02, 1.0, 0.0, a22), (b0, 0.0, b2)
    return (a00, a01, 0.0, a11, 0.0, 1.0), (b0, b1, 0.0)
