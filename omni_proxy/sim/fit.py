"""An engine model from recorded runs: what a worker took for its prompts and its tokens, as a load client saw it. Pure.

Prefill is fitted to requests that had the worker for themselves until their first token, decode to all others, too:

    TTFT = const + token_s · computed + pair_s · pairs            TPOT = const + seq_s · n + kv_s · tokens in context

Coefficients are not negative: a cost that would be is left out and the rest fitted again. What is minimised is the
relative error, after which the tenth that fits worst is left out once: stalls of a busy machine do not make the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from msgspec import structs

from omni_proxy.config import ConfigError
from omni_proxy.sim.bench.measure import Seen
from omni_proxy.sim.engine_model import EngineModel, pairs

LEAST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how well it fits: the median of |predicted - measured| / measured on each side."""

    model: EngineModel
    prefill_samples: int
    decode_samples: int
    prefill_error: float
    decode_error: float


Sample = tuple[tuple[float, ...], float]


def fit_model(runs: Sequence[Sequence[Seen]], base: EngineModel) -> Fit:
    """Fit the costs of `base` to runs against one worker that does both. Raises ConfigError without enough samples."""
    prefill = [sample for run in runs for sample in _prefill_samples(run)]
    decode = [sample for run in runs for sample in _decode_samples(run)]
    for name, samples in (("prompts that had the worker for themselves", prefill), ("answers", decode)):
        if len(samples) < LEAST_SAMPLES:
            raise ConfigError(f"the runs hold {len(samples)} {name}; a fit needs {LEAST_SAMPLES}")
    first, later = _robust(prefill), _robust(decode)
    # One step's own time belongs to both sides; the decode side tells it apart from the rest of a first token.
    step_s = min(first[0], later[0]) / 2
    model = structs.replace(
        base,
        about="fitted from recorded runs",
        step_s=step_s,
        token_s=first[1],
        pair_s=first[2],
        decode_s=later[0] - step_s,
        seq_s=later[1],
        kv_s=later[2],
        request_s=max(0.0, first[0] - step_s),
        first_token_s=0.0,
    )
    return Fit(model, len(prefill), len(decode), _error(prefill, first), _error(decode, later))


def _answered(run: Sequence[Seen]) -> list[Seen]:
    return [s for s in run if s.outcome == "completed" and s.first is not None and s.last is not None]


def _prefill_samples(run: Sequence[Seen]) -> list[Sample]:
    """(1, computed tokens, pairs) -> time to first token, of requests that were alone by then."""
    samples: list[Sample] = []
    for one in _answered(run):
        assert one.first is not None
        if any(s.sent < one.first and s.ended > one.sent for s in run if s is not one):
            continue
        cached = one.cached_tokens or 0
        computed = one.prompt_tokens - cached
        samples.append(((1.0, float(computed), pairs(computed, cached)), one.first - one.sent))
    return samples


def _decode_samples(run: Sequence[Seen]) -> list[Sample]:
    """(1, mean sequences, mean tokens in context) -> time per token."""
    answered = _answered(run)
    samples: list[Sample] = []
    for one in answered:
        found = one.latency()
        assert one.first is not None
        assert one.last is not None
        if found is None or found.tpot is None or one.last <= one.first:
            continue
        seqs = kv = 0.0
        for other in answered:
            assert other.first is not None
            assert other.last is not None
            shared = max(0.0, min(one.last, other.last) - max(one.first, other.first)) / (one.last - one.first)
            seqs += shared
            kv += shared * (other.prompt_tokens + (other.completion_tokens or 0) / 2)
        samples.append(((1.0, seqs, kv), found.tpot))
    return samples


def _robust(samples: Sequence[Sample]) -> tuple[float, ...]:
    rough = least_squares(samples)
    ordered = sorted(samples, key=lambda sample: abs(_predict(sample[0], rough) - sample[1]) / sample[1])
    return least_squares(ordered[: max(LEAST_SAMPLES, round(0.9 * len(ordered)))])


def _predict(x: Sequence[float], coefficients: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, coefficients, strict=True))


def least_squares(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Coefficients, none negative, that minimise the squared relative error."""
    width = len(samples[0][0])
    used = list(range(width))
    while used:
        found = _solve(samples, used)
        negative = [place for place, value in zip(used, found, strict=True) if value < 0]
        if not negative:
            values = dict(zip(used, found, strict=True))
            return tuple(values.get(place, 0.0) for place in range(width))
        used.remove(max(negative))  # the finest effect first; the constant last
    return (0.0,) * width


def _solve(samples: Sequence[Sample], used: Sequence[int]) -> list[float]:
    """Normal equations of the relative error by elimination; a column that tells nothing gets 0."""
    size = len(used)
    scale = [max(abs(x[place]) for x, _ in samples) or 1.0 for place in used]
    rows = [[0.0] * (size + 1) for _ in range(size)]
    for x, y in samples:
        weighted = [x[place] / scale[i] / y for i, place in enumerate(used)]
        for i in range(size):
            for j in range(size):
                rows[i][j] += weighted[i] * weighted[j]
            rows[i][size] += weighted[i]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12 * len(samples):
            rows[i] = [0.0] * (size + 1)
            rows[i][i] = 1.0
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]


def _error(samples: Sequence[Sample], coefficients: Sequence[float]) -> float:
    return median(abs(_predict(x, coefficients) - y) / y for x, y in samples)
