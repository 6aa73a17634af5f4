"""Who comes back: found by the last whole block of the prompt, counted by tenant and by how often it came before."""

from __future__ import annotations

import pytest

from omni_proxy.scheduler.allowance import Allowance
from omni_proxy.scheduler.returns import MOST_KNOWN, PATIENCE_S, Conversation, Returns


def ended(returns: Returns, key: int, tenant: str = "", turns: int = 0, at: float = 0.0) -> Conversation:
    conversation = Conversation(f"r{key}", key, tenant, turns, at)
    returns.ended(conversation)
    return conversation


def test_a_longer_prompt_with_the_same_beginning_is_the_next_turn() -> None:
    returns = Returns()
    first = ended(returns, 5)
    assert returns.came((1, 2, 3)) is None
    assert returns.came((3, 4, 5)) is None  # the same prompt again
    assert returns.came((3, 4, 5, 6)) is first
    assert returns.came((3, 4, 5, 6)) is None


def test_the_longest_known_beginning_counts() -> None:
    returns = Returns()
    ended(returns, 3)
    later = ended(returns, 5)
    assert returns.came((3, 4, 5, 6)) is later


def test_the_same_prompt_again_takes_the_place_of_the_first() -> None:
    returns = Returns()
    first = ended(returns, 5)
    assert returns.ended(Conversation("again", 5, "", 0, 1.0)) == [first]
    assert len(returns) == 1


def test_who_has_not_come_in_time_is_given_up() -> None:
    returns = Returns()
    first, second = ended(returns, 1), ended(returns, 2, at=10.0)
    assert returns.forget(PATIENCE_S - 1) == []
    assert returns.forget(PATIENCE_S) == [first]
    assert returns.forget(PATIENCE_S + 10) == [second]
    assert len(returns) == 0


def test_shares_are_learned_by_tenant_and_turn() -> None:
    returns = Returns()
    assert returns.likely("a", 0) == pytest.approx(0.5)
    for number in range(300):
        ended(returns, number, "chat")
        returns.came((number, -1))
        ended(returns, 1000 + number, "batch", at=number)
    returns.forget(1e6)
    assert returns.likely("chat", 0) > 0.9
    assert returns.likely("batch", 0) < 0.1
    assert returns.likely("batch", 0) < returns.likely("unknown", 0) < returns.likely("chat", 0)
    assert returns.likely("chat", 7) == returns.likely("unknown", 0)


def test_no_more_are_known_than_there_is_room_for() -> None:
    returns = Returns()
    gone = [returns.ended(Conversation(str(key), key, "", 0, 0.0)) for key in range(MOST_KNOWN + 2)]
    assert [c.key for found in gone for c in found] == [0, 1]


def test_an_allowance_fills_as_time_passes_and_may_be_overdrawn_once() -> None:
    allowance = Allowance(0.5, 0.0)
    assert allowance.has(0.0)
    allowance.spend(7.0)  # 5 were there
    assert not allowance.has(1.0)
    at = allowance.back_at()
    assert at == pytest.approx(4.0, abs=1e-3)
    assert allowance.has(at)
    assert allowance.has(1e6)
    allowance.spend(5.0)  # no more than ten seconds' worth is saved up
    assert not allowance.has(1e6)
