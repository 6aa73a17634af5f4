"""From counters to windows, max/mean and idle experts."""

from __future__ import annotations

from omni_proxy.observe.expert_loads import ROWS_PER_EXPERT, ExpertLoad, ExpertLoads, ExpertReading, Layers

FULL = 4 * ROWS_PER_EXPERT
"""Rows that close a window of four experts."""


def only(loads: ExpertLoads) -> ExpertLoad:
    (load,) = loads.all()
    return load


def reading(*layers: tuple[int, ...]) -> ExpertReading:
    return ExpertReading(tuple(layers))


def test_the_first_reading_is_a_window_since_the_engine_started() -> None:
    loads = ExpertLoads()
    loads.read("d0", reading((FULL, 0, 0, 0), (100, 100, 100, 100)), 5.0)
    load = only(loads)
    assert (load.closed, load.window_s, load.at) == (True, None, 5.0)
    assert load.imbalances == [4.0, 1.0]
    assert load.imbalance == 2.5
    assert load.idle == 3


def test_a_window_closes_when_it_has_rows_enough() -> None:
    loads = ExpertLoads()
    loads.read("d0", reading((FULL, 0, 0, 0)), 10.0)
    loads.read("d0", reading((FULL, 1, 1, 1)), 20.0)
    assert (only(loads).at, only(loads).tokens, only(loads).idle) == (10.0, ((FULL, 0, 0, 0),), 3)
    assert only(loads).total == ((FULL, 1, 1, 1),)
    loads.read("d0", reading((FULL, 150, 150, 150)), 30.0)
    load = only(loads)
    assert (load.at, load.window_s, load.tokens) == (30.0, 20.0, ((0, 150, 150, 150),))
    assert load.imbalance == 150 * 4 / 450
    assert load.idle == 1


def test_few_rows_are_shown_and_not_judged() -> None:
    loads = ExpertLoads()
    loads.read("d0", reading((3, 0, 0, 1)), 1.0)
    loads.read("d0", reading((5, 0, 0, 1)), 2.0)
    load = only(loads)
    assert (load.closed, load.window_s, load.tokens) == (False, None, ((5, 0, 0, 1),))


def test_an_engine_that_began_anew_begins_a_window() -> None:
    for later in ((FULL, 0, 0, 1), (FULL, 9)):
        loads = ExpertLoads()
        loads.read("d0", reading((FULL, 7, 0, 0)), 1.0)
        loads.read("d0", reading(later), 2.0)
        load = only(loads)
        assert (load.tokens, load.window_s) == ((later,), None)


def test_layers_without_rows_count_for_nothing() -> None:
    loads = ExpertLoads()
    layers: Layers = ((), (0, 0), (300, 100))
    loads.read("d0", ExpertReading(layers, (1.5, 2.5)), 1.0)
    load = only(loads)
    assert (load.imbalances, load.imbalance, load.idle) == ([None, None, 1.5], 1.5, 0)
    assert load.rank_imbalance == 2.0


def test_who_says_nothing_is_not_there_and_who_left_is_forgotten() -> None:
    loads = ExpertLoads()
    loads.read("d0", ExpertReading(()), 1.0)
    loads.read("d1", reading((1, 2)), 1.0)
    loads.read("d2", reading((1, 2)), 1.0)
    assert [load.worker for load in loads.all()] == ["d1", "d2"]
    loads.keep({"d0", "d2"})
    assert [load.worker for load in loads.all()] == ["d2"]
