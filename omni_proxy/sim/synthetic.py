"""Generated workloads: Poisson arrivals, bursts, shared prefixes, sessions of several turns. Pure; chance is seeded.

A workload is named on the command line as `KIND,key=value,...`; every key has a default, an unknown one is a fault.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from omni_proxy.config import ConfigError
from omni_proxy.sim.workload import SimRequest, Workload

BLOCK_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """What may be set of a generated workload. Lengths are medians of log-normal distributions."""

    requests: int = 1000
    rate: float = 5.0
    """Requests in a second, over the whole workload."""
    prompt: float = 2000.0
    output: float = 200.0
    spread: float = 0.8
    """Standard deviation of the logarithm of both lengths; 0 makes all equal."""
    burst: float = 20.0
    """Mean requests of one burst (`bursts`), or questions about one document (`fanout`)."""
    prefixes: float = 20.0
    """How many different shared prefixes there are (`prefixes`); the n-th is used in proportion to 1/n."""
    prefix: float = 1500.0
    """Tokens of a shared prefix (`prefixes`), of the system prompt (`turns`), median of the documents (`fanout`)."""
    turns: float = 4.0
    """Mean turns of one session (`turns`)."""
    phase: float = 60.0
    """Seconds after which the load changes (`shift`)."""
    swing: float = 4.0
    """Prompts are so many times longer and answers shorter than the medians, then the reverse (`shift`)."""
    think: float = 5.0
    """Mean seconds between the end of a turn and the next (`turns`)."""


class _Keys:
    """Hands out block keys that nobody has used."""

    def __init__(self) -> None:
        self._last = 0

    def blocks(self, tokens: int) -> tuple[int, ...]:
        """Keys for the begun blocks of so many tokens."""
        count = -(-tokens // BLOCK_TOKENS)
        first, self._last = self._last + 1, self._last + count
        return tuple(range(first, first + count))


def parse_synthetic(text: str, seed: int) -> Workload:
    """The workload that `KIND,key=value,...` names. Raises ConfigError."""
    kind, *settings = text.split(",")
    make = KINDS.get(kind)
    if make is None:
        raise ConfigError(f"--synthetic: there is no workload {kind!r}; known are {', '.join(KINDS)}")
    spec = SyntheticSpec()
    for setting in settings:
        key, _, value = setting.partition("=")
        spec = _set(spec, key, value)
    chance = random.Random(seed)
    requests = tuple(make(spec, chance))
    return Workload(kind, BLOCK_TOKENS, requests)


def _set(spec: SyntheticSpec, key: str, value: str) -> SyntheticSpec:
    known = {f.name for f in fields(SyntheticSpec)}
    if key not in known:
        raise ConfigError(f"--synthetic: there is no setting {key!r}; known are {', '.join(sorted(known))}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    least = 0.0 if key in ("spread", "think", "prefix") else 1e-9
    if not least <= number < 1e9 or (key == "requests" and number < 1):
        raise ConfigError(f"--synthetic: {key}: must be a number above 0, got {value!r}")
    return replace(spec, **{key: int(number) if key == "requests" else number})  # type: ignore[arg-type]


def _poisson(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    keys, at = _Keys(), 0.0
    for _ in range(spec.requests):
        at += chance.expovariate(spec.rate)
        prompt = _length(spec.prompt, spec, chance)
        yield SimRequest(at, prompt, _length(spec.output, spec, chance), keys.blocks(prompt))


def _bursts(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    """Bursts at Poisson instants; the requests of one burst come within a tenth of a second."""
    keys, at, made = _Keys(), 0.0, 0
    while made < spec.requests:
        at += chance.expovariate(spec.rate / spec.burst)
        size = min(spec.requests - made, 1 + int(chance.expovariate(1.0) * (spec.burst - 1) + 0.5))
        instants = sorted(at + chance.uniform(0, 0.1) for _ in range(size))
        at = instants[-1]
        made += size
        for instant in instants:
            prompt = _length(spec.prompt, spec, chance)
            yield SimRequest(instant, prompt, _length(spec.output, spec, chance), keys.blocks(prompt))


def _shift(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    """Long prompts with short answers and short prompts with long answers, in turn."""
    keys, at = _Keys(), 0.0
    for _ in range(spec.requests):
        at += chance.expovariate(spec.rate)
        swing = spec.swing if int(at / spec.phase) % 2 == 0 else 1 / spec.swing
        prompt = _length(spec.prompt * swing, spec, chance)
        yield SimRequest(at, prompt, _length(spec.output / swing, spec, chance), keys.blocks(prompt))


def _prefixes(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    """Each prompt is one of some long prefixes (system prompts, documents) and a part of its own."""
    keys, at = _Keys(), 0.0
    whole = max(1, round(spec.prefix / BLOCK_TOKENS)) * BLOCK_TOKENS
    shared = [keys.blocks(whole) for _ in range(max(1, round(spec.prefixes)))]
    weights = [1 / (n + 1) for n in range(len(shared))]
    for _ in range(spec.requests):
        at += chance.expovariate(spec.rate)
        own = _length(spec.prompt, spec, chance)
        (prefix,) = chance.choices(shared, weights)
        yield SimRequest(at, whole + own, _length(spec.output, spec, chance), prefix + keys.blocks(own))


def _fanout(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    """Documents that nobody has asked about before, each with several questions within a tenth of a second."""
    keys, at, made = _Keys(), 0.0, 0
    while made < spec.requests:
        at += chance.expovariate(spec.rate / spec.burst)
        whole = max(1, round(_length(spec.prefix, spec, chance) / BLOCK_TOKENS)) * BLOCK_TOKENS
        document = keys.blocks(whole)
        size = min(spec.requests - made, 1 + int(chance.expovariate(1.0) * (spec.burst - 1) + 0.5))
        instants = sorted(at + chance.uniform(0, 0.1) for _ in range(size))
        at = instants[-1]
        made += size
        for instant in instants:
            own = _length(spec.prompt, spec, chance)
            yield SimRequest(instant, whole + own, _length(spec.output, spec, chance), document + keys.blocks(own))


def _turns(spec: SyntheticSpec, chance: random.Random) -> Iterator[SimRequest]:
    """Sessions whose next prompt is the last one, its answer and a new part; all begin with one system prompt."""
    keys, at, made = _Keys(), 0.0, 0
    system = max(1, round(spec.prefix / BLOCK_TOKENS)) * BLOCK_TOKENS
    system_keys = keys.blocks(system)
    while made < spec.requests:
        at += chance.expovariate(spec.rate / spec.turns)
        turns = min(spec.requests - made, 1 + int(chance.expovariate(1.0) * (spec.turns - 1) + 0.5))
        history, known = system, system_keys
        for turn in range(turns):
            prompt = history + _length(spec.prompt, spec, chance)
            output = _length(spec.output, spec, chance)
            prompt_keys = known + keys.blocks(prompt - len(known) * BLOCK_TOKENS)
            wait = at if turn == 0 else chance.expovariate(1 / spec.think) if spec.think else 0.0
            yield SimRequest(wait, prompt, output, prompt_keys, after=made - 1 if turn else None)
            made += 1
            # The block that the prompt filled in part is another one once the answer stands in it.
            history, known = prompt + output, prompt_keys[: prompt // BLOCK_TOKENS]


def _length(median: float, spec: SyntheticSpec, chance: random.Random) -> int:
    return max(1, round(median * math.exp(chance.gauss(0.0, spec.spread))))


KINDS: Final[Mapping[str, Callable[[SyntheticSpec, random.Random], Iterator[SimRequest]]]] = {
    "poisson": _poisson,
    "bursts": _bursts,
    "shift": _shift,
    "prefixes": _prefixes,
    "fanout": _fanout,
    "turns": _turns,
}
