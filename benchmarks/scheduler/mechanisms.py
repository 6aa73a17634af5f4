"""For each mechanism a workload that needs it, with the mechanism on and off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Arrived, Effect, Event, Tokenized
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.cluster import SimWorker
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.figures import Slo, figures
from omni_proxy.sim.presets import preset
from omni_proxy.sim.run import CoreLike
from omni_proxy.sim.setup import LoadBasis, at_load, cluster_of
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

_FANOUT = "fanout,requests=2000,burst=8,prefix=6000,prompt=200,output=150,spread=0.6"


@dataclass(frozen=True, slots=True)
class Case:
    """One mechanism: its name, the load that needs it, and the settings that switch it off and on."""

    name: str
    workload: str
    prefill: int = 6
    decode: int = 6
    load: float | None = None
    """Of what is to be computed after cache hits; None: the rate as the workload has it."""
    off: Mapping[str, object] = field(default_factory=dict)
    on: Mapping[str, object] = field(default_factory=dict)
    decode_seqs: int | None = None
    reads_prompts: bool = True
    """False: the gateway has no tokenizer, and clients name their sessions."""


def _without(name: str) -> Mapping[str, object]:
    return {"without": frozenset({name})}


CASES: Sequence[Case] = (
    Case("places are kept", _FANOUT, load=0.9, off=_without("places")),
    Case("blocks under way count", _FANOUT, load=0.7, off=_without("foreseen")),
    Case("work weighs more when many wait", _FANOUT, load=0.8, off=_without("depth")),
    Case(
        "more is sent ahead when many wait",
        "bursts,requests=4000,burst=400,prompt=100,output=30,spread=0.5",
        load=0.8,
        off=_without("ahead"),
    ),
    Case(
        "homes of sessions, where prompts cannot be read",
        "turns,requests=2000,turns=8,prompt=1500,prefix=1500,think=5,rate=40",
        off=_without("homes"),
        reads_prompts=False,
    ),
    Case(
        "the shortest answer goes first",
        "poisson,requests=2000,prompt=1000,output=200,spread=1.0,rate=10",
        decode=2,
        decode_seqs=16,
        off=_without("answers"),
    ),
    Case(
        "handoff by cost",
        "poisson,requests=2500,prompt=300,spread=1.8,output=60",
        prefill=1,
        decode=2,
        load=0.6,
        on={"aggregate_below_tokens": None},
    ),
)


class _Unread:
    """A core whose gateway cannot read prompts: no block keys, but the client names the session."""

    def __init__(self, core: Core, sessions: Mapping[str, str]) -> None:
        self._core = core
        self._sessions = sessions
        self.next_wakeup = core.next_wakeup
        self.waiting = core.waiting

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Arrived):
            event = Arrived(event.rid, replace(event.spec, session=self._sessions[event.rid]))
        elif isinstance(event, Tokenized):
            event = Tokenized(event.rid, event.prompt_tokens, ())
        return self._core.handle(event, now)


def _sessions(workload: Workload) -> dict[str, str]:
    """By the id that the simulator gives a request: the session that it belongs to."""
    found: dict[int, str] = {}
    for number, request in enumerate(workload.requests):
        found[number] = f"s{number}" if request.after is None else found[request.after]
    return {f"r{number:07d}": session for number, session in found.items()}


def _core(case: Case, workload: Workload, settings: Mapping[str, object]) -> Callable[[ExactIndex], CoreLike]:
    scheduling = SchedulingSettings(**settings)  # type: ignore[arg-type]
    core = Core(CoreSettings(prefix_aware=True, queue_timeout_s=1e6, scheduling=scheduling))
    return lambda index: core if case.reads_prompts else _Unread(core, _sessions(workload))


def _cluster(case: Case) -> tuple[SimWorker, ...]:
    model = preset("h200-deepseek-r1")
    if case.decode_seqs is not None:
        model = structs.replace(model, max_decode_seqs=case.decode_seqs)
    return cluster_of(None, case.prefill, case.decode, 0, model)


def compare_mechanisms(say: Callable[[str], None]) -> None:
    """Print the table."""
    say(f"{'TTFT in seconds':50}{'mean':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'TPOT p99':>11}{'goodput':>10}{'cached':>9}")
    for case in CASES:
        workers, workload = _cluster(case), parse_synthetic(case.workload, 0)
        if case.load is not None:
            workload = at_load(workload, workers, case.load, LoadBasis.SHARED)
        at = "" if case.load is None else f" at {case.load:g} (shared)"
        say(f"{case.prefill}P + {case.decode}D, {case.workload}{at}")
        for how, settings in (("on", case.on), ("off", case.off)):
            found = figures(World(workload, workers, _core(case, workload, settings)).run().records, Slo())
            assert found.ttft is not None
            assert found.tpot is not None
            ttft = "".join(f"{getattr(found.ttft, what):8.2f}" for what in ("mean", "p50", "p90", "p99"))
            tail = f"{1000 * found.tpot.p99:8.1f} ms{found.goodput:8.2f}/s{found.cached_share:9.1%}"
            say(f"  {case.name + ': ' + how:48}{ttft}{tail}")
