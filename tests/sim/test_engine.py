"""The simulated engine: its times by hand, its memory, and runs of passes against single passes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.sim.engine import Notice
from omni_proxy.sim.job import Job
from tests.sim.helpers import SMALL, Told, drive, engine, job, small


def near(told: list[Told]) -> object:
    return [(pytest.approx(at), notice, rid) for at, notice, rid in told]


def test_a_prompt_is_computed_in_chunks_and_then_answered() -> None:
    # 100 tokens in passes of 64 and 36; then passes of 0.01 + 0.01 + 0.001 + context
    told = drive(engine(), [(0.0, job(1, 100, 3))])
    first = 0.01 + 0.064 + 0.01 + 0.036
    last = first + 2 * 0.021 + (101 + 102) * 1e-6
    assert told == near([(first, Notice.FIRST, "j1"), (last, Notice.FINISHED, "j1")])


def test_a_prefill_leg_is_held_until_it_is_released() -> None:
    one = engine()
    held = job(1, 100, 9, keep_kv=True)
    one.submit(held, 0.0)
    while one.wake_at is not None:
        one.advance(one.wake_at)
    assert one.cache.used_tokens == 100
    one.release(held, 1.0)
    assert one.cache.used_tokens == 0
    assert one.cache.cached_blocks == 6


def test_a_decode_leg_starts_with_the_pass_after_its_pull() -> None:
    told = drive(engine(), [(0.0, job(1, 100, 2, pull=True))], pull_s=0.5)
    one_pass = 0.021 + 100e-6
    assert told == near(
        [
            (0.0, Notice.PULL, "j1"),
            (0.5 + one_pass, Notice.FIRST, "j1"),
            (0.5 + 2 * one_pass + 1e-6, Notice.FINISHED, "j1"),
        ]
    )


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    one = engine()
    second = job(2, 100, 1)
    told = drive(one, [(0.0, job(1, 100, 1)), (1.0, second)])
    assert second.cached_tokens == 96
    assert told[-1:] == near([(1.0 + 0.01 + 0.004, Notice.FINISHED, "j2")])


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    one = engine()
    second = job(2, 96, 1)
    drive(one, [(0.0, job(1, 96, 1)), (1.0, second)])
    assert second.cached_tokens == 80


def test_the_least_recently_used_blocks_make_room() -> None:
    gone: list[int] = []
    one = engine(small(kv_capacity_tokens=224))
    one.cache._on_removed = gone.extend
    drive(one, [(0.0, job(1, 96, 1, 0)), (1.0, job(2, 96, 1, 100)), (2.0, job(3, 48, 1, 200))])
    assert gone == [5, 4]  # the tail of the oldest prompt


def test_without_room_the_youngest_computes_its_context_again() -> None:
    one = engine(small(kv_capacity_tokens=160))
    first, second = job(1, 60, 40), job(2, 60, 40, 100)
    told = drive(one, [(0.0, first), (0.0, second)])
    assert one.counters.preemptions == 1
    ends = [(notice, rid) for _, notice, rid in told]
    assert ends.count((Notice.FIRST, "j2")) == 1
    assert ends[-2:] == [(Notice.FINISHED, "j1"), (Notice.FINISHED, "j2")]
    assert (first.generated, second.generated) == (40, 40)
    assert one.cache.used_tokens == 0


def test_sequences_beyond_the_limit_wait() -> None:
    told = drive(engine(max_seqs=1), [(0.0, job(1, 16, 2)), (0.0, job(2, 16, 2, 100))])
    assert [(notice.name, rid) for _, notice, rid in told] == [
        ("FIRST", "j1"),
        ("FINISHED", "j1"),
        ("FIRST", "j2"),
        ("FINISHED", "j2"),
    ]


@pytest.mark.parametrize("at", [0.005, 0.02, 0.05, 0.3])
def test_an_aborted_job_is_never_heard_of_again(at: float) -> None:
    one = engine()
    gone = job(1, 100, 50)
    told = drive(one, [(0.0, gone), (0.0, job(2, 100, 5, 100))], aborts=[(at, gone)])
    assert all(when <= at for when, _, rid in told if rid == "j1")
    assert told[-1][1:] == (Notice.FINISHED, "j2")
    assert one.cache.used_tokens == 0


def _jobs(seed: int, count: int) -> list[tuple[float, Job]]:
    chance = random.Random(seed)
    made = []
    for serial in range(count):
        prompt = chance.randint(1, 150)
        kind = chance.choice(["whole", "keep", "pull"])
        one = job(serial, prompt, chance.randint(1, 60), chance.choice([0, 500, 1000 * serial + 5000]))
        one.keep_kv, one.pull = kind == "keep", kind == "pull"
        made.append((round(chance.uniform(0, 4), 4), one))
    return made


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([256, 400, 1024]), seqs=st.sampled_from([2, 4, 16]))
def test_runs_of_passes_equal_single_passes(seed: int, capacity: int, seqs: int) -> None:
    """The short cut over many decode passes gives the very instants of walking through them one by one."""
    model = small(kv_capacity_tokens=capacity)
    aborted = random.Random(seed).sample(range(12), 2)
    results = []
    for every_token in (False, True):
        one = engine(model, seqs, every_token)
        jobs = _jobs(seed, 12)
        aborts = [(jobs[n][0] + 0.3, jobs[n][1]) for n in aborted]
        told = drive(one, jobs, aborts)
        assert one.cache.used_tokens == 0
        assert (one.running, one.waiting) == (0, 0)
        results.append([t for t in told if t[1] is not Notice.TOKEN])
    walked, jumped = sorted(results[1], key=str), sorted(results[0], key=str)
    assert [(n, r) for _, n, r in sorted(walked, key=lambda t: (t[2], t[1].name))] == [
        (n, r) for _, n, r in sorted(jumped, key=lambda t: (t[2], t[1].name))
    ]
    by_name = {(n, r): at for at, n, r in walked}
    for at, notice, rid in jumped:
        assert at == pytest.approx(by_name[notice, rid], abs=1e-6)


def test_a_job_larger_than_the_memory_can_never_be_held() -> None:
    assert not engine().can_ever_hold(job(1, SMALL.kv_capacity_tokens, 1))
    assert engine().can_ever_hold(job(1, SMALL.kv_capacity_tokens, 1, keep_kv=True))
