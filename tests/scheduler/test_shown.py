"""What the scheduler shows of itself: fitted models with their error, and predictions beside what came."""

from __future__ import annotations

import pytest

from omni_proxy.api.app import worker_json
from omni_proxy.core import Core
from omni_proxy.messages import Arrived, Close, DecodeDone, Event, FirstToken, PrefillDone, Usage
from omni_proxy.observe.tallies import Tallies
from tests.core.steps import core_of, d, p, spec


def serve(core: Core, rid: str, begin: float, prefill_s: float, tallies: Tallies | None = None) -> None:
    """A prompt of 1,000 tokens whose answer begins 10 ms after it is computed."""
    done = begin + prefill_s
    steps: list[tuple[float, Event]] = [
        (begin, Arrived(rid, spec(1000, stream=True))),
        (done, PrefillDone(p(rid, 1, "p0"), True, usage=Usage(1000, 1, 0))),
        (done + 0.01, FirstToken(d(rid, 2, "d0"))),
        (done + 0.3, DecodeDone(d(rid, 2, "d0"), Usage(1000, 10, None))),
    ]
    for at, event in steps:
        effects = core.handle(event, at)
        for effect in effects:
            if tallies is not None and isinstance(effect, Close):
                tallies.closed(effect.record, at)


def cost_of(core: Core, name: str) -> dict[str, object]:
    (worker,) = [w for w in core.workers() if w.name == name]
    found = worker_json(worker, 100.0)["prefill_cost"]
    assert isinstance(found, dict)
    return found


def test_the_fitted_model_and_its_error() -> None:
    core = core_of("p0", "d0")
    before = cost_of(core, "p0")
    assert (before["observations"], before["rejected"]) == (0, 0)
    for number in range(20):
        serve(core, f"r{number}", 1.0 * number, 0.2)
    after = cost_of(core, "p0")
    seconds = after["prompt_s"] + 1000 * after["token_s"] + 500_000 * after["pair_s"]  # type: ignore[operator]
    assert seconds == pytest.approx(0.2, rel=0.1)
    assert after["observations"] == 19  # the last is complete when it is clear that no other shared its pass
    assert 0.0 <= after["error"] < 1.0  # type: ignore[operator]


@pytest.mark.parametrize(("prefill_s", "ratio"), [(0.2, 1.0), (0.4, 0.5)])
def test_predictions_are_compared_with_what_came(prefill_s: float, ratio: float) -> None:
    core, tallies = core_of("p0", "d0"), Tallies()
    for number in range(20):
        serve(core, f"r{number}", 1.0 * number, 0.2)
    serve(core, "last", 50.0, prefill_s, tallies)
    assert sum(tallies.ttft_predicted.counts) == 1
    assert tallies.ttft_predicted.total == pytest.approx(ratio, rel=0.15)
