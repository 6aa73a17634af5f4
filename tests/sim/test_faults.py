"""The world under a core that changes its mind: legs aborted and tried again at any time leave nothing behind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Cancelled, Effect, Event, Mode, StartDecode, StartPrefill
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World
from tests.sim.helpers import SMALL, Checked


class Fickle(Checked):
    """The live core whose clients leave in the middle: after some legs have begun, it is told that theirs are gone."""

    def __init__(self, core: Core, chance: random.Random) -> None:
        super().__init__(core)
        self._chance = chance
        self._leaving: list[str] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        for effect in effects:
            if isinstance(effect, StartPrefill | StartDecode) and self._chance.random() < 0.3:
                self._leaving.append(effect.lease.rid)
        if self._leaving and self._chance.random() < 0.3:
            effects += super().handle(Cancelled(self._leaving.pop(0)), now)
        return effects


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(list(Mode)))
def test_nothing_is_left_of_requests_whose_clients_leave(seed: int, mode: Mode) -> None:
    workload = parse_synthetic("prefixes,requests=40,rate=8,prompt=100,prefix=128,output=20", seed)
    chosen = CoreSettings(schedule_mode=mode, prefix_aware=True)
    world = World(workload, make_cluster(2, 2, 0, SMALL), lambda index: Fickle(Core(chosen), random.Random(seed)))
    run = world.run()
    assert len(run.records) == 40
    for engine in run.engines:
        while engine.wake_at is not None:
            engine.advance(engine.wake_at)
        assert (engine.running, engine.waiting, engine.cache.used_tokens) == (0, 0, 0)
