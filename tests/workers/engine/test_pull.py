"""The pull's state machine against a keeper that loses, repeats, delays, damages and invents pieces."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.workers.engine.leases import Claim
from omni_proxy.workers.engine.pull import WINDOW, Header, Pull, PullState, piece_crc

BLOCK = 8
BLOCKS = 9


def content(first: int, count: int) -> bytes:
    return b"".join(bytes([first + i]) * BLOCK for i in range(count))


def claim() -> Claim:
    return Claim("P", "r", tuple(range(BLOCKS)), 33, "digest", {})


def pull(first: int = 0) -> Pull:
    return Pull(claim(), first, blocks_per_piece=2, block_bytes=BLOCK, timeout_s=4.0, now=0.0)


def opened(p: Pull) -> list[Header]:
    assert [header["kind"] for header in p.begin()] == ["open"]
    return p.receive({"kind": "opened", "serial": 7}, None, 0.0)


def piece(read: Header, payload: bytes | None = None, **changes: Any) -> tuple[Header, memoryview]:
    numbers = [read[name] for name in ("serial", "seq", "first", "count")]
    serial, seq, first, count = (n if isinstance(n, int) else 0 for n in numbers)
    data = content(first, count) if payload is None else payload
    crc = piece_crc(serial, seq, first, count, content(first, count))
    header: Header = {"kind": "piece", "serial": serial, "seq": seq, "first": first, "count": count, "crc": crc}
    header.update(changes)
    return header, memoryview(data)


def serve(p: Pull, reads: list[Header], now: float = 0.0) -> list[Header]:
    """Answer reads rightly until the pull asks for no more; returns what is not a read."""
    todo: deque[Header] = deque(reads)
    rest: list[Header] = []
    while todo:
        for header in p.receive(*piece(todo.popleft()), now):
            (todo if header["kind"] == "read" else rest).append(header)
    return rest


def test_all_blocks_come_in_order_and_the_end_is_acknowledged() -> None:
    p = pull()
    reads = opened(p)
    assert len(reads) == WINDOW
    assert serve(p, reads) == [{"kind": "done", "request_id": "r", "serial": 7}]
    assert p.state is PullState.DONE
    assert b"".join(bytes(x) for x in p.pieces) == content(0, BLOCKS)


def test_blocks_known_already_are_not_asked_for() -> None:
    p = pull(first=8)
    assert [(r["first"], r["count"]) for r in opened(p)] == [(8, 1)]


def test_a_refusal_ends_it_with_the_reason() -> None:
    p = pull()
    p.begin()
    assert p.receive({"kind": "refused", "reason": "no KV is kept"}, None, 0.0) == []
    assert (p.state, p.error) == (PullState.FAILED, "refused: no KV is kept")


def test_a_damaged_piece_is_asked_for_again() -> None:
    p = pull()
    reads = opened(p)
    (again,) = p.receive(*piece(reads[0], payload=bytes(2 * BLOCK)), 0.0)
    assert again == reads[0]
    serve(p, [again, *reads[1:]])
    assert p.state is PullState.DONE


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": b"short"},
        {"payload": bytes(2 * BLOCK)},
        {"crc": 1},
        {"crc": None},
        {"first": 4},
        {"count": 1},
    ],
)
def test_pieces_that_stay_wrong_fail_the_pull(wrong: dict[str, Any]) -> None:
    p = pull()
    todo = deque(opened(p)[:1])
    while todo and p.state is PullState.READING:
        todo.extend(p.receive(*piece(todo.popleft(), **wrong), 0.0))
    assert p.state is PullState.FAILED
    assert "wrong size or checksum" in p.error


@pytest.mark.parametrize("strange", [{"serial": 6}, {"seq": 99}, {"seq": -1}, {"seq": None}, {"kind": "?"}])
def test_messages_that_were_not_asked_for_change_nothing(strange: dict[str, Any]) -> None:
    p = pull()
    reads = opened(p)
    assert p.receive(*piece(reads[0], **strange), 0.0) == []
    serve(p, reads)
    assert p.state is PullState.DONE


def test_a_piece_before_the_opening_is_ignored() -> None:
    p = pull()
    p.begin()
    assert p.receive(*piece({"serial": 0, "seq": 0, "first": 0, "count": 2}), 0.0) == []
    assert p.state is PullState.OPENING


def test_a_second_copy_counts_once() -> None:
    p = pull()
    reads = opened(p)
    more = p.receive(*piece(reads[0]), 0.0)
    assert len(more) == 1
    assert p.receive(*piece(reads[0]), 0.0) == []
    serve(p, [*reads[1:], *more])
    assert b"".join(bytes(x) for x in p.pieces) == content(0, BLOCKS)


def test_a_lost_piece_is_asked_for_again_after_half_the_time_out() -> None:
    p = pull()
    reads = opened(p)
    for read in reads[1:]:
        p.receive(*piece(read), 0.0)
    assert p.tick(1.9) == []
    assert reads[0] in p.tick(2.0)
    serve(p, [reads[0], *p.tick(2.1)], now=2.2)
    assert p.state in (PullState.READING, PullState.DONE)


def test_silence_fails_it() -> None:
    p = pull()
    p.begin()
    assert [h["kind"] for h in p.tick(2.0)] == ["open"]
    assert p.tick(3.9) == []
    assert p.tick(4.0) == []
    assert (p.state, p.error) == (PullState.FAILED, "no answer for 4 s (0 of 5 pieces came)")


def test_progress_restarts_the_clock() -> None:
    p = pull()
    reads = opened(p)
    p.receive(*piece(reads[0]), 3.0)
    assert p.next_tick == 5.0


def test_a_piece_after_the_end_changes_nothing() -> None:
    p = pull()
    reads = opened(p)
    p.give_up("unreachable")
    assert p.receive(*piece(reads[0]), 0.0) == []
    assert p.error == "unreachable"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_under_any_losses_it_is_whole_or_failed(data: st.DataObject) -> None:
    """Each answer may be lost, damaged, doubled or overtaken; DONE always means the right bytes."""
    p = pull(first=data.draw(st.integers(0, BLOCKS - 1)))
    now = 0.0
    flying = opened(p)
    for _ in range(200):
        if p.state is not PullState.READING:
            break
        if not flying:
            now = p.next_tick
            flying = p.tick(now)
            continue
        read = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
        match data.draw(st.sampled_from(["right", "right", "right", "lost", "damaged", "doubled"])):
            case "right":
                flying += p.receive(*piece(read), now)
            case "damaged":
                flying += p.receive(*piece(read, payload=b"\xff" * 2 * BLOCK), now)
            case "doubled":
                flying += p.receive(*piece(read), now)
                flying += p.receive(*piece(read), now)
        flying = [header for header in flying if header["kind"] == "read"]
    assert p.state in (PullState.DONE, PullState.FAILED)
    if p.state is PullState.DONE:
        assert b"".join(bytes(x) for x in p.pieces) == content(p.first, BLOCKS - p.first)
