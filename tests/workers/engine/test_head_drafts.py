"""How long a head's drafts are, when there are none, and when the text's are taken instead."""

from __future__ import annotations

import pytest

from omni_proxy.workers.engine.head_drafts import GUESS, HeadDrafter
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.speculation import Drafter, gain
from omni_proxy.workers.engine.types import EngineRequest
from tests.workers.engine.helpers import greedy, prompt


def sequence(tokens: tuple[int, ...] = prompt(30), max_tokens: int = 10**6) -> Sequence:
    seq = Sequence(EngineRequest("r", tokens, greedy(max_tokens)), 4)
    seq.tokens.append(99)
    return seq


def drafter(row_s: float = 0.2, max_len: int = 10**6, longest: int = 8) -> HeadDrafter:
    """One that knows what a step takes, and what a guess adds to it."""
    made = HeadDrafter(Drafter(longest, max_len), longest, max_len)
    for _ in range(5):
        made.took([()], 1.0)
    made.took([(GUESS,)], 1.0 + row_s)
    return made


def test_steps_without_drafts_come_first_and_now_and_then() -> None:
    made, seq = HeadDrafter(Drafter(8, 1000), 8, 1000), sequence()
    assert made.propose(seq, 1, 100) == ()
    for _ in range(3):
        made.took([()], 1.0)
    assert made.propose(seq, 1, 100)[:1] == (GUESS,)
    assert made.propose(seq, 2, 100) == ()  # nothing is known of two sequences
    for _ in range(64):
        made.took([(GUESS, GUESS)], 1.1)
    assert made.propose(seq, 1, 100) == ()
    made.took([()], 1.0)
    assert made.propose(seq, 1, 100)[:1] == (GUESS,)


def test_guesses_grow_with_luck_and_stop_without() -> None:
    made, seq = drafter(), sequence()
    first = made.propose(seq, 1, 100)
    assert set(first) == {GUESS}
    for _ in range(20):
        made.checked(seq, 1, 4, 4)
    assert len(made.propose(seq, 1, 100)) == 8 > len(first)
    while draft := made.propose(seq, 1, 100):
        made.checked(seq, 1, len(draft), 0)
    assert made.propose(seq, 1, 100) == ()


def test_a_head_that_is_never_right_wastes_little() -> None:
    made, seq, wasted = drafter(), sequence(), 0
    for n in range(2000):
        draft = made.propose(seq, 1, 100)
        wasted += len(draft)
        if draft:
            made.checked(seq, 1, len(draft), 0)
        seq.tokens.append(n % 1009)
    assert 0 < wasted * 0.2 < 0.02 * 2000


def test_one_that_costs_more_than_it_gives_pauses_though_it_is_right() -> None:
    made, seq, drafted = drafter(row_s=1.5), sequence(), 0
    for n in range(500):
        draft = made.propose(seq, 1, 100)
        drafted += len(draft)
        if draft:
            made.checked(seq, 1, len(draft), len(draft))
            made.took([draft], 1.0 + 1.5 * len(draft))
        seq.tokens.append(n % 1009)
    assert drafted < 20


def test_a_first_step_that_took_too_long_is_forgotten() -> None:
    made, seq, drafted = drafter(row_s=9.0), sequence(), []
    for n in range(300):
        draft = made.propose(seq, 1, 100)
        drafted.append(len(draft))
        if draft:
            made.checked(seq, 1, len(draft), len(draft))
        made.took([draft], 1.0 + 0.1 * len(draft))
        seq.tokens.append(n % 1009)
    assert drafted[-1] == 8 or drafted[-2] == 8  # a step without drafts may come between


@pytest.mark.parametrize(
    ("max_tokens", "max_len", "most", "expected"), [(1, 99, 9, 0), (3, 99, 9, 1), (9, 33, 9, 1), (9, 99, 2, 2)]
)
def test_guesses_stay_within_what_may_still_come(max_tokens: int, max_len: int, most: int, expected: int) -> None:
    assert len(drafter(max_len=max_len).propose(sequence(max_tokens=max_tokens), 1, most)) == expected


def test_before_the_first_token_nothing_is_guessed() -> None:
    seq = sequence()
    del seq.tokens[-1]
    assert drafter().propose(seq, 1, 9) == ()


def test_text_that_repeats_takes_over_and_gives_back() -> None:
    """A draft from the text costs no run of the head; while it is not taken it is watched."""
    made, loop = drafter(row_s=0.4), (1, 2, 3, 4, 5) * 6
    seq = sequence(loop[:-1])
    seq.tokens[-1] = 5
    kinds = []
    for n in range(400):
        draft = made.propose(seq, 1, 100)
        guessed = draft[:1] == (GUESS,)
        kinds.append("head" if guessed else "text" if draft else "none")
        repeats = n < 40 or n >= 200
        right = len(draft) if repeats else min(1, len(draft)) if guessed else 0
        if draft:
            made.checked(seq, 1, len(draft), right)
        seq.tokens += [seq.tokens[-5] if repeats else 100 + n]
    assert kinds[39] == "text"
    assert "text" not in kinds[60:200]
    assert kinds[-1] == "text"


def test_gain() -> None:
    assert gain(0.5, 0, 0.3) == 0
    assert gain(0.5, 2, 0.3) == pytest.approx(0.15)


def test_a_sequence_begins_where_others_ended() -> None:
    made = drafter()
    for name in range(20):
        seq = Sequence(EngineRequest(str(name), prompt(30), greedy(100)), 4)
        seq.tokens.append(99)
        while draft := made.propose(seq, 1, 100):
            made.checked(seq, 1, len(draft), 0)
        made.forget(str(name))
    seq = sequence()
    assert made.propose(seq, 1, 100) == ()
    seq.tokens += prompt(64, seed=5)
    assert len(made.propose(seq, 1, 100)) == 1


def tried(made: HeadDrafter, name: str, tokens: int, right: bool) -> list[int]:
    """Lengths at which drafts of one answer were made, all of them right or all of them wrong."""
    seq, places = Sequence(EngineRequest(name, prompt(30), greedy(tokens)), 4), []
    seq.tokens.append(99)
    while seq.num_generated < tokens:
        draft = made.propose(seq, 1, 100)
        if draft:
            places.append(seq.num_generated)
            made.checked(seq, 1, len(draft), len(draft) if right else 0)
        seq.tokens += [1000 + seq.num_generated] * (1 + len(draft) * right)
    made.forget(name)
    return places


def test_a_few_failures_end_it_and_the_pauses_double() -> None:
    """Of answers of 160 tokens that cannot be guessed, soon one token each."""
    made = drafter()
    assert tried(made, "first", 160, right=False) == [1, 2, 3, 19, 51, 115]
    answers = [tried(made, str(name), 160, right=False) for name in range(6)]
    assert len(answers[0]) <= 4
    assert answers[-1] == [65]


def test_short_answers_find_back_too() -> None:
    made = drafter()
    tried(made, "bad", 160, right=False)
    answers = [tried(made, str(n), 20, right=False) for n in range(12)]
    assert 0 < sum(map(len, answers)) < 12


def test_a_guess_that_is_right_after_a_pause_ends_the_pauses() -> None:
    made = drafter()
    tried(made, "bad", 400, right=False)
    places = tried(made, "good", 200, right=True)
    assert places[0] == 65
    assert places[1] <= 68
    assert len(places) > 15
    assert tried(made, "better", 40, right=True)[0] == 1


def test_an_ended_sequence_is_forgotten() -> None:
    made, seq = drafter(), sequence()
    made.propose(seq, 1, 9)
    made.forget("r")
    assert made._lucks == {}
