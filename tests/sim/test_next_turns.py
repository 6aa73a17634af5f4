"""What is known of next turns in a workload, and a run in which they are computed ahead."""

from __future__ import annotations

from omni_proxy.core import Core, CoreSettings
from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.next_turns import foreseen, next_turns
from omni_proxy.sim.presets import PRESETS
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World

TURNS = "turns,requests=120,rate=2,prompt=800,output=600,turns=4,think=3"


def test_what_a_workload_says_counts() -> None:
    workload = parse_synthetic(TURNS, 1)
    said = {r.after: number for number, r in enumerate(workload.requests) if r.after is not None}
    assert next_turns(workload) == said
    number, following = next(iter(said.items()))
    known = foreseen(workload, number, following)
    request, after = workload.requests[number], workload.requests[following]
    assert known.prompt_tokens == request.prompt_tokens + request.output_tokens
    assert known.block_keys == after.block_keys[: len(known.block_keys)]
    assert len(known.block_keys) == known.prompt_tokens // 64


def test_a_trace_is_read_by_its_prefixes() -> None:
    first = SimRequest(0.0, 130, 60, (1, 2, 3))
    other = SimRequest(1.0, 130, 70, (1, 7, 8))
    second = SimRequest(2.0, 260, 10, (1, 2, 4, 5, 6))
    again = SimRequest(3.0, 260, 10, (1, 2, 4, 5, 9))
    workload = Workload("t", 64, (first, other, second, again))
    assert next_turns(workload) == {0: 2}
    known = foreseen(workload, 1, None)
    assert known.block_keys[:2] == (1, 7)
    assert known.block_keys[2:] == (-1 - (1 << 24),)


def mean_later(prewarm: PrewarmSettings | None) -> tuple[float, Core]:
    workload = parse_synthetic(TURNS, 1)
    cores = []

    def make(_: object) -> Core:
        cores.append(Core(CoreSettings(prefix_aware=True, prewarm=prewarm)))
        return cores[0]

    run = World(workload, make_cluster(2, 2, 0, next(iter(PRESETS.values()))), make).run()
    later = set(next_turns(workload).values())
    waits = [r.first_token_at - r.arrived_at for r in run.records if int(r.rid[1:]) in later and r.first_token_at]
    assert len(run.records) == 120
    cores[0].check()
    return sum(waits) / len(waits), cores[0]


def test_next_turns_come_sooner() -> None:
    off, _ = mean_later(None)
    on, core = mean_later(PrewarmSettings())
    counts = core.prewarms()
    assert counts is not None
    assert counts.used_tokens > counts.sent_tokens / 2
    assert on < 0.95 * off
