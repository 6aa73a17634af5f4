"""A pushed handoff without sockets: both halves over a link that loses, doubles, damages and delays messages."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.workers.engine.inflow import Ask, Inflow, ask_header, parse_ask
from omni_proxy.workers.engine.leases import Refusal
from omni_proxy.workers.engine.pieces import PieceGrid, blocks_per_push
from omni_proxy.workers.engine.pull import Header, PullState, piece_crc
from omni_proxy.workers.engine.rooms import MAX_EARLY, WINDOW, Outflow, RoomBook

SIZE = 4
LAYOUT = {"layers": 3, "block_size": SIZE}
BYTES = 2


def grid(tokens: int, layers: int = 3, first: int = 0, per_piece: int = 2) -> PieceGrid:
    return PieceGrid(layers, first, -(-tokens // SIZE), per_piece)


def ask(room: int = 1, tokens: int = 10, **changes: Any) -> Ask:
    fields: dict[str, Any] = {"num_tokens": tokens, "prompt_digest": "x", "layout": LAYOUT, "grid": grid(tokens)}
    return Ask(room, **{**fields, **changes})


def content(layer: int, block: int) -> bytes:
    return bytes([layer, block])


class Rig:
    """A sender and a receiver, each with a clock that both share, and what is on the way between them."""

    def __init__(self, tokens: int = 10, first: int = 0, layers: int = 3) -> None:
        self.now = 0.0
        self.tokens = tokens
        self.layers = layers
        self.layout = {"layers": layers, "block_size": SIZE}
        self.book = RoomBook(self.layout, layers, SIZE, wait_s=5.0)
        self.grid = grid(tokens, layers, first)
        self.got: dict[tuple[int, int], bytes] = {}
        self.inflow = Inflow("d", Ask(1, tokens, "x", self.layout, self.grid), BYTES, 2.0, self.now, self.sink)
        self.to_sender: deque[Header] = deque(self.inflow.begin())
        self.to_receiver: deque[tuple[Header, bytes | None]] = deque()
        self.computed: set[tuple[int, int]] = set()
        """(layer, block) that may be read."""
        self.flow: Outflow | None = None

    def sink(self, layer: int, first: int, count: int, data: memoryview) -> None:
        for at in range(count):
            key = layer, first + at
            assert key not in self.got, "a piece was taken twice"
            self.got[key] = bytes(data[at * BYTES : (at + 1) * BYTES])

    def open(self) -> None:
        early = self.book.open(1, "p", self.tokens, "x", self.now)
        self.flow = self.book.get(1)
        if early is not None:
            self.answer(self.book.join(*early, self.now))

    def answer(self, answer: Outflow | Refusal | None) -> None:
        if isinstance(answer, Refusal):
            self.to_receiver.append(({"kind": "refused", "reason": answer.reason}, None))
        elif answer is not None:
            self.to_receiver.append(({"kind": "joined", "serial": answer.serial}, None))

    def hear(self, header: Header) -> None:
        """What `KvPusher.handle` does with a message."""
        if header["kind"] == "join":
            parsed = parse_ask(header)
            assert parsed is not None
            return self.answer(self.book.join(b"D", parsed, self.now))
        if header["kind"] == "leave":
            self.book.leave(b"D", 1, self.now)
            return None
        flow = self.book.get(1, header.get("serial"))
        if flow is None:
            return None
        seq = header.get("seq")
        match header["kind"]:
            case "ack":
                assert isinstance(seq, int)
                flow.acked(seq, self.now)
            case "again":
                assert isinstance(seq, int)
                flow.again(seq)
            case "ping":
                flow.all_again()
                self.to_receiver.append(({"kind": "alive", "serial": flow.serial}, None))
            case "done":
                self.book.close("p", self.now)
        return None

    def pump(self) -> None:
        for flow in self.book:
            for piece in flow.take(self.now):
                keys = [(piece.layer, piece.first + i) for i in range(len(piece.block_ids))]
                assert set(keys) <= self.computed, "a piece left before it was computed"
                data = b"".join(content(layer, block) for layer, block in keys)
                crc = piece_crc(piece.serial, piece.seq, piece.first, len(keys), data)
                header: Header = {"kind": "layer", "serial": piece.serial, "seq": piece.seq, "crc": crc}
                self.to_receiver.append((header, data))
            assert len(flow._on_the_way) <= WINDOW

    def say(self, headers: list[Header]) -> None:
        self.to_sender.extend(headers)

    def compute(self, start: int, stop: int, layers: int | None = None) -> None:
        """A step over some tokens; `layers` of them are done so far, None: the step has ended."""
        flow = self.flow
        if flow is None or self.book.get(1) is None:
            return
        blocks = tuple(range(100, 100 + -(-self.tokens // SIZE)))
        flow.computing(blocks, start, stop)
        whole = blocks if stop >= self.tokens else blocks[: stop // SIZE]
        for layer in range(self.layers if layers is None else layers):
            self.computed |= {(layer, block) for block in range(len(whole))}
            flow.layers_done(layer + 1)
            self.pump()
        if layers is None:
            flow.computed(self.now)
        self.pump()

    def right(self) -> bool:
        last = self.grid.blocks
        want = {(layer, b): content(layer, b) for layer in range(self.layers) for b in range(self.grid.first, last)}
        return self.got == want


def run(rig: Rig, rounds: int = 200) -> None:
    """Carry all messages until nothing moves."""
    for _ in range(rounds):
        rig.pump()
        while rig.to_sender:
            rig.hear(rig.to_sender.popleft())
        rig.pump()
        while rig.to_receiver:
            header, data = rig.to_receiver.popleft()
            rig.say(rig.inflow.receive(header, None if data is None else memoryview(data), rig.now))
        if not rig.to_sender:
            return


@pytest.mark.parametrize("tokens", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("decode_first", [True, False])
def test_all_blocks_of_all_layers_arrive(tokens: int, decode_first: bool) -> None:
    rig = Rig(tokens)
    if decode_first:
        run(rig)
        rig.open()
    else:
        rig.open()
        rig.compute(0, tokens)
    run(rig)
    rig.compute(0, tokens)
    run(rig)
    assert rig.inflow.state is PullState.DONE
    assert rig.right()
    assert len(rig.book) == 0


def test_a_layer_leaves_when_it_is_computed_and_not_before() -> None:
    rig = Rig(16)
    rig.open()
    run(rig)
    rig.compute(0, 16, layers=1)
    run(rig)
    assert set(rig.got) == {(0, block) for block in range(4)}
    rig.compute(0, 16, layers=2)
    run(rig)
    assert set(rig.got) == {(layer, block) for layer in (0, 1) for block in range(4)}


def test_a_block_that_is_half_full_waits_for_the_rest_of_it() -> None:
    rig = Rig(10)
    rig.open()
    run(rig)
    rig.compute(0, 7)
    run(rig)
    assert rig.got == {}  # a piece is two blocks, the second is half empty
    rig.compute(7, 9)
    run(rig)
    assert {block for _, block in rig.got} == {0, 1}
    rig.compute(9, 10)
    run(rig)
    assert rig.right()


def test_time_on_the_way_is_told_apart_by_the_end_of_the_step() -> None:
    flow = Outflow(1, 1, "p", 8, "x", SIZE)
    flow.join(b"D", grid(8, layers=2))
    flow.computing((5, 6), 0, 8)
    flow.layers_done(1)
    assert [piece.seq for piece in flow.take(1.0)] == [0]
    flow.acked(0, 1.5)  # hidden: 0.5
    flow.layers_done(2)
    assert [piece.seq for piece in flow.take(2.0)] == [1]
    flow.computed(2.25)  # hidden: 0.25
    flow.acked(1, 3.0)  # exposed: 0.75
    assert (flow.overlap.hidden_s, flow.overlap.exposed_s) == (0.75, 0.75)


def test_nothing_is_read_from_blocks_that_were_taken_away() -> None:
    rig = Rig(16)
    rig.open()
    run(rig)
    rig.compute(0, 8)
    assert rig.flow is not None
    rig.flow.paused()
    rig.flow.all_again()
    assert list(rig.flow.take(rig.now)) == []
    rig.compute(0, 16)
    run(rig)
    assert rig.right()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 60), first=st.integers(0, 3), layers=st.integers(1, 4))
def test_a_bad_link_never_gives_wrong_blocks_and_no_room_stays(seed: int, tokens: int, first: int, layers: int) -> None:
    """Whatever is lost, doubled, damaged or late, and whoever dies: right or failed, and all is freed."""
    chance = random.Random(seed)
    rig = Rig(tokens, min(first, -(-tokens // SIZE) - 1), layers)
    loss, damage = chance.choice([0.0, 0.1, 0.4]), chance.choice([0.0, 0.05, 0.5])
    opened_at, dies_at = chance.randrange(20), chance.choice([None, None, chance.randrange(60)])
    done = 0
    for turn in range(400):
        rig.now += chance.random() * 0.3
        if turn == opened_at:
            rig.open()
        sender_lives = dies_at is None or turn < dies_at
        if rig.flow is not None and done < tokens and sender_lives and chance.random() < 0.5:
            if chance.random() < 0.1:
                rig.flow.paused()
                done = 0
            else:
                stop = min(tokens, done + chance.randrange(1, 20))
                rig.compute(done, stop, chance.choice([None, None, layers - 1]))
                done = stop if rig.flow._valid >= stop else done
        if sender_lives:
            while rig.to_sender:
                header = rig.to_sender.popleft()
                for _ in range(0 if chance.random() < loss else chance.choice([1, 1, 2])):
                    rig.hear(header)
            rig.pump()
        while rig.to_receiver and chance.random() < 0.8:
            header, data = rig.to_receiver.popleft()
            if data is not None and chance.random() < damage:
                data = bytes([data[0] ^ 1]) + data[1:]
            for _ in range(0 if chance.random() < loss else chance.choice([1, 1, 2])):
                rig.say(rig.inflow.receive(header, None if data is None else memoryview(data), rig.now))
        rig.say(rig.inflow.tick(rig.now))
    for key, data in rig.got.items():
        assert data == content(*key)
    if rig.inflow.state is PullState.DONE:
        assert rig.right()
    else:
        assert rig.inflow.state is PullState.FAILED
        assert rig.inflow.error
    rig.book.close("p", rig.now)  # the prefill leg's own end, or its lease's
    assert len(rig.book) == 0
    assert rig.book.of("p") is None


# -- who may join


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 9}, "a prompt of 10 tokens, not 9"),
        ({"prompt_digest": "y"}, "another prompt or cache salt"),
        ({"layout": {**LAYOUT, "block_size": 8}}, "block_size is 4 here and 8 there"),
        ({"grid": PieceGrid(3, 3, 3, 2)}, "no pieces of 2 blocks from block 3 on"),
        ({"grid": PieceGrid(3, 0, 3, 0)}, "no pieces of 0 blocks"),
        ({"grid": PieceGrid(3, -1, 3, 1)}, "from block -1 on"),
        ({"grid": PieceGrid(2, 0, 3, 1)}, "3 blocks in 3 layers, not 3 in 2"),
        ({"grid": PieceGrid(3, 0, 10**9, 1)}, "not 1000000000 in 3"),
    ],
)
def test_what_does_not_match_is_refused(changes: dict[str, Any], reason: str) -> None:
    book = RoomBook(LAYOUT, 3, SIZE, 5.0)
    book.open(1, "p", 10, "x", 0.0)
    answer = book.join(b"D", ask(**changes), 0.0)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_a_second_receiver_is_refused_and_the_first_may_say_it_again() -> None:
    book = RoomBook(LAYOUT, 3, SIZE, 5.0)
    book.open(1, "p", 10, "x", 0.0)
    first = book.join(b"D", ask(), 0.0)
    assert first is book.join(b"D", ask(), 0.0)
    assert isinstance(book.join(b"E", ask(), 0.0), Refusal)
    assert book.leave(b"E", 1, 0.0) is None
    assert book.leave(b"D", 1, 0.0) is first


def test_early_joins_are_forgotten_in_time_and_bounded() -> None:
    book = RoomBook(LAYOUT, 3, SIZE, wait_s=5.0)
    assert book.join(b"D", ask(1), 0.0) is None
    assert book.join(b"E", ask(1), 0.0) is None  # the first to come has the room
    assert book.open(1, "p", 10, "x", 4.0) == (b"D", ask(1))
    assert book.join(b"D", ask(2), 0.0) is None
    assert book.open(2, "late", 10, "x", 5.0) is None
    for room in range(10, 10 + MAX_EARLY + 3):
        book.join(b"D", ask(room), 6.0)
    assert book.num_early == MAX_EARLY
    book.join(b"D", ask(9), 20.0)
    assert book.num_early == 1


def test_a_receiver_that_left_before_keeps_the_room_shut() -> None:
    book = RoomBook(LAYOUT, 3, SIZE, 5.0)
    book.join(b"D", ask(), 0.0)
    book.leave(b"D", 1, 0.0)
    assert book.open(1, "p", 10, "x", 1.0) is None
    assert 1 not in book


# -- words


def test_an_ask_survives_its_header() -> None:
    assert parse_ask(ask_header(ask())) == ask()


@pytest.mark.parametrize(
    "change",
    [
        {"room": None},
        {"num_tokens": "4"},
        {"prompt_digest": 1},
        {"layout": []},
        {"grid": [1, 2]},
        {"grid": [1, 2, 3, True]},
    ],
)
def test_a_malformed_ask_is_none(change: dict[str, Any]) -> None:
    assert parse_ask({**ask_header(ask()), **change}) is None


def test_pieces_cover_every_block_once() -> None:
    cut = PieceGrid(2, 1, 8, 3)
    seen = [(layer, block) for seq in range(cut.count) for layer, f, n in [cut.place(seq)] for block in range(f, f + n)]
    assert seen == [(layer, block) for layer in range(2) for block in range(1, 8)]
    assert blocks_per_push(1 << 30) == 1
    assert blocks_per_push(1 << 10) == 512


def test_a_receiver_gives_up_after_its_time_and_says_so() -> None:
    rig = Rig(10)
    assert rig.inflow.tick(0.9) == []
    assert rig.inflow.tick(1.0) == rig.inflow.begin()
    assert [header["kind"] for header in rig.inflow.tick(2.0)] == ["leave"]
    assert rig.inflow.error == "no sign of the prefill worker for 2 s (0 of 6 pieces came)"
    assert rig.inflow.receive({"kind": "joined", "serial": 1}, None, 3.0) == []


def test_signs_of_life_keep_a_receiver_waiting() -> None:
    rig = Rig(10)
    rig.inflow.receive({"kind": "joined", "serial": 1}, None, 0.0)
    for second in range(1, 20):
        assert [header["kind"] for header in rig.inflow.tick(float(second))] == ["ping"]
        rig.inflow.receive({"kind": "alive", "serial": 1}, None, float(second))
    assert rig.inflow.state is PullState.READING
