"""What a step computes, as tables of steps; and that no interleaving loses a block, shares one wrongly or starves."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.workers.engine.blocks import BlockPool
from omni_proxy.workers.engine.planner import Plan, Planner
from omni_proxy.workers.engine.sequence import Phase, Sequence
from omni_proxy.workers.engine.types import EngineRequest, PullFrom, SamplingParams

SIZE = 4


def sequence(name: str, tokens: int | list[int], priority: int = 0, pull: int = 0, salt: str = "") -> Sequence:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    source = PullFrom("P", name, "h", 1, tuple(range(-(-pull // SIZE))), pull) if pull else None
    request = EngineRequest(
        name, tuple(ids), SamplingParams(100), priority=priority, pull=source, cache_salt=salt or name
    )
    return Sequence(request, SIZE)


def planner(blocks: int = 16, seqs: int = 4, tokens: int = 16) -> tuple[Planner, BlockPool]:
    pool = BlockPool(blocks, SIZE)
    return Planner(pool, seqs, tokens), pool


def chunks(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(c.seq.request_id, c.start, c.count, c.samples) for c in plan.chunks]


def carry_out(planner: Planner, plan: Plan, token: int = 9) -> None:
    for chunk in plan.chunks:
        planner.advance(chunk, token if chunk.samples else None)


def step(planner: Planner) -> list[tuple[str, int, int, bool]]:
    plan = planner.plan()
    result = chunks(plan)
    carry_out(planner, plan)
    planner.check()
    return result


def test_a_long_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    plans, _ = planner(tokens=6)
    plans.add(sequence("a", 15))
    assert step(plans) == [("a", 0, 6, False)]
    assert step(plans) == [("a", 6, 6, False)]
    assert step(plans) == [("a", 12, 3, True)]
    assert step(plans) == [("a", 15, 1, True)]


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    plans, _ = planner(tokens=8)
    plans.add(sequence("a", 3))
    assert step(plans) == [("a", 0, 3, True)]
    plans.add(sequence("b", 5))
    plans.add(sequence("c", 5))
    assert step(plans) == [("a", 3, 1, True), ("b", 0, 5, True), ("c", 0, 2, False)]
    assert step(plans) == [("a", 4, 1, True), ("b", 5, 1, True), ("c", 2, 3, True)]


def test_chunks_of_one_token_come_first() -> None:
    plans, _ = planner(tokens=5)
    plans.add(sequence("a", 4))
    plans.add(sequence("b", 1))
    assert step(plans) == [("b", 0, 1, True), ("a", 0, 4, True)]


def test_lower_priority_values_go_first_then_arrival() -> None:
    plans, _ = planner(seqs=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        plans.add(sequence(name, 2, priority))
    for name in ("first", "second", "late"):
        assert step(plans) == [(name, 0, 2, True)]
        plans.remove(name)


def test_a_request_waits_for_blocks_and_none_overtakes_it() -> None:
    plans, _ = planner(blocks=5)
    plans.add(sequence("a", 8))
    plans.add(sequence("big", 12))
    plans.add(sequence("small", 1))
    assert step(plans) == [("a", 0, 8, True)]
    assert (plans.num_running, plans.num_waiting) == (1, 2)
    plans.remove("a")
    assert step(plans) == [("small", 0, 1, True), ("big", 0, 12, True)]


def test_the_sequence_admitted_last_is_preempted_and_recomputed() -> None:
    plans, pool = planner(blocks=5)
    plans.add(sequence("a", 7))
    plans.add(sequence("b", 3))
    assert step(plans) == [("a", 0, 7, True), ("b", 0, 3, True)]
    assert step(plans) == [("a", 7, 1, True), ("b", 3, 1, True)]
    assert step(plans) == [("a", 8, 1, True), ("b", 4, 1, True)]  # five blocks: 3 and 2
    for _ in range(3):
        step(plans)
    plan = plans.plan()  # a's 13th token needs a block
    assert chunks(plan) == [("a", 12, 1, True)]
    assert [seq.request_id for seq in plan.preempted] == ["b"]
    carry_out(plans, plan)
    b = plans.get("b")
    assert b is not None
    assert (b.phase, b.blocks, b.num_generated) == (Phase.WAITING, [], 6)
    plans.remove("a")
    assert step(plans) == [("b", 4, 5, True)]  # its first full block is still cached
    assert pool.num_used == 3


def test_a_lone_sequence_that_cannot_grow_waits_until_the_pins_are_gone() -> None:
    plans, pool = planner(blocks=3)
    plans.add(sequence("kept", 8))
    step(plans)
    plans.remove("kept", pin_prompt=True)
    plans.add(sequence("a", 4))
    assert step(plans) == [("a", 0, 4, True)]
    assert step(plans) == []  # preempts itself
    assert step(plans) == []
    pool.unpin("kept")
    assert step(plans) == [("a", 4, 1, True)]


def test_a_cached_prompt_still_computes_its_last_token_and_shares_its_blocks() -> None:
    plans, pool = planner()
    plans.add(sequence("a", 8, salt="same"))
    step(plans)
    plans.add(sequence("b", 8, salt="same"))
    plan = plans.plan()
    assert chunks(plan) == [("a", 8, 1, True), ("b", 7, 1, True)]
    a, b = plans.get("a"), plans.get("b")
    assert a is not None
    assert b is not None
    assert b.blocks == a.blocks[:2]
    assert b.cached_tokens == 7
    assert [pool.refs(block) for block in b.blocks] == [2, 2]
    carry_out(plans, plan)
    plans.check()


def test_another_salt_shares_nothing() -> None:
    plans, _ = planner()
    plans.add(sequence("a", 8, salt="x"))
    step(plans)
    plans.add(sequence("b", 8, salt="y"))
    assert step(plans)[1] == ("b", 0, 8, True)


def test_a_pulled_prompt_joins_when_its_kv_is_there_and_computes_one_token() -> None:
    plans, pool = planner()
    plans.add(sequence("d", 10, pull=10))
    plan = plans.plan()
    assert (chunks(plan), [seq.request_id for seq in plan.pulls]) == ([], ["d"])
    assert pool.num_used == 3
    assert step(plans) == []
    plans.pull_finished("d")
    plans.check()
    assert step(plans) == [("d", 9, 1, True)]
    plans.add(sequence("e", 9, salt="d"))
    assert step(plans)[1] == ("e", 8, 1, True)  # pulled blocks are cached too


def test_a_pull_of_part_of_the_prompt_leaves_the_rest_to_compute() -> None:
    plans, _ = planner()
    plans.add(sequence("d", 10, pull=6))
    plans.plan()
    plans.pull_finished("d")
    assert step(plans) == [("d", 6, 4, True)]


def test_a_failed_pull_is_recomputed_in_the_same_blocks() -> None:
    plans, _ = planner()
    plans.add(sequence("d", 10, pull=10))
    plans.plan()
    plans.pull_failed("d")
    assert step(plans) == [("d", 0, 10, True)]


def test_a_preempted_decode_leg_is_recomputed_not_pulled_again() -> None:
    plans, _ = planner(blocks=4)
    plans.add(sequence("a", 7))
    step(plans)
    plans.add(sequence("d", 4, pull=4))
    plans.plan()
    plans.pull_finished("d")
    assert step(plans) == [("a", 7, 1, True), ("d", 3, 1, True)]
    plan = plans.plan()
    while not plan.preempted:
        carry_out(plans, plan)
        plan = plans.plan()
    assert plan.preempted[0].request_id == "d"
    carry_out(plans, plan)
    plans.remove("a")
    plan = plans.plan()
    assert not plan.pulls
    assert chunks(plan)[0][0] == "d"


def test_unpublished_blocks_are_never_shared() -> None:
    """Two equal prompts in one batch compute side by side: neither sees the other's half-made blocks."""
    plans, _ = planner(tokens=8)
    plans.add(sequence("a", 8, salt="same"))
    plans.add(sequence("b", 8, salt="same"))
    assert step(plans) == [("a", 0, 8, True)]
    assert step(plans) == [("a", 8, 1, True), ("b", 7, 1, True)]


class Burst:
    """As many steps as the machine's draw says, within the sequences' limit."""

    def __init__(self, machine: PlannerMachine) -> None:
        self._machine = machine

    def steps(self, sequences: list[Sequence]) -> int:
        left = min(self._machine.limit - len(seq.tokens) for seq in sequences)
        return max(1, min(self._machine.burst, left))


class PlannerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, preemption, pulls, leases and drafts, right or wrong, in any order.

    `content` is what lies in each place of each block, written as the runner would write it. Whatever a sequence
    believes valid must be what it would have written itself.
    """

    @initialize(blocks=st.integers(4, 10), seqs=st.integers(1, 4), extra=st.integers(0, 6))
    def start(self, blocks: int, seqs: int, extra: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.draft: tuple[int, ...] = ()
        self.burst = 1
        self.planner = Planner(self.pool, seqs, seqs + extra, self, Burst(self))
        self.content: dict[tuple[int, int], object] = {}
        self.kept: dict[str, tuple[list[int], list[object]]] = {}
        self.count = 0
        self.limit = blocks * SIZE

    def propose(self, seq: Sequence, sequences: int, most: int) -> tuple[int, ...]:
        """As a drafter: whatever this step's draw says, within the sequence's limit."""
        return self.draft[: max(0, min(most, self.limit - len(seq.tokens) - 1))]

    def reach(self, seq: Sequence, steps: int) -> int:
        """As if this step's draft was made in each of so many steps."""
        return min(steps * (1 + len(self.draft)), self.limit - len(seq.tokens))

    def identity(self, seq: Sequence, position: int, draft: tuple[int, ...] = ()) -> object:
        """KV at a position depends on all tokens up to it."""
        return (seq.request.cache_salt, *(*seq.tokens, *draft)[: position + 1])

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=15),
        priority=st.integers(0, 1),
        salt=st.sampled_from("xy"),
        pulled=st.integers(0, 15),
    )
    def arrive(self, tokens: list[int], priority: int, salt: str, pulled: int) -> None:
        self.count += 1
        pull = min(pulled, len(tokens)) if pulled > 4 else 0
        if len(tokens) < self.limit:
            self.planner.add(sequence(str(self.count), tokens, priority, pull, salt))

    @precondition(lambda self: bool(list(self.planner)))
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: Any, keep: bool) -> None:
        seq = data.draw(st.sampled_from(list(self.planner)))
        done = seq.phase is Phase.RUNNING and seq.kv_len >= seq.prompt_len
        self.planner.remove(seq.request_id, pin_prompt=keep and done)
        if keep and done:
            prompt = [self.identity(seq, i) for i in range(seq.prompt_len)]
            self.kept[seq.request_id] = (list(seq.blocks), prompt)

    @precondition(lambda self: bool(self.kept))
    @rule(data=st.data())
    def lease_ends(self, data: Any) -> None:
        owner = data.draw(st.sampled_from(sorted(self.kept)))
        blocks, prompt = self.kept.pop(owner)
        for position, identity in enumerate(prompt):
            place = (blocks[position // SIZE], position % SIZE)
            assert self.content[place] == identity, "leased KV was overwritten"
        assert self.pool.unpin(owner)

    @precondition(lambda self: any(s.phase is Phase.PULLING for s in self.planner))
    @rule(data=st.data(), works=st.booleans())
    def pull_ends(self, data: Any, works: bool) -> None:
        seq = data.draw(st.sampled_from([s for s in self.planner if s.phase is Phase.PULLING]))
        if not works:
            self.planner.pull_failed(seq.request_id)
            return
        assert seq.request.pull is not None
        for position in range(seq.kv_len, seq.request.pull.num_tokens):
            self.write(seq, position)
        self.planner.pull_finished(seq.request_id)

    @rule(
        steps=st.integers(1, 4),
        token=st.integers(0, 1),
        draft=st.lists(st.integers(0, 1), max_size=6),
        burst=st.integers(1, 6),
    )
    def steps(self, steps: int, token: int, draft: list[int], burst: int) -> None:
        self.draft, self.burst = tuple(draft), burst
        for _ in range(steps):
            plan = self.planner.plan()
            assert sum(c.rows for c in plan.chunks) <= self.planner._max_tokens
            counts = [c.rows for c in plan.chunks]
            assert counts == sorted(counts, key=lambda n: n != 1)
            assert len({c.seq.request_id for c in plan.chunks}) == len(plan.chunks)
            for chunk in plan.chunks:
                for position in range(chunk.start, chunk.start + chunk.rows):
                    if position >= chunk.seq.kv_len:
                        self.write(chunk.seq, position, chunk.draft)
            for chunk in plan.chunks:
                roomy = len(chunk.seq.blocks) * SIZE - len(chunk.seq.tokens) + 1
                reached = min(self.reach(chunk.seq, plan.steps), roomy) if plan.steps > 1 else 1
                assert reached >= plan.steps
                more = (token,) * (reached - 1)
                for position in range(chunk.start + 1, chunk.start + reached):
                    self.write(chunk.seq, position, more)
                self.planner.advance(chunk, token if chunk.samples else None)
                for guess in chunk.draft or more:
                    if guess != token or len(chunk.seq.tokens) >= self.limit:
                        break
                    self.planner.confirm(chunk.seq, token)
                if len(chunk.seq.tokens) >= self.limit:
                    self.planner.remove(chunk.seq.request_id)

    def write(self, seq: Sequence, position: int, draft: tuple[int, ...] = ()) -> None:
        block = seq.blocks[position // SIZE]
        assert self.pool.refs(block) == 1, "a shared block is written"
        assert not self.pool.is_published(block), "a cached block is written"
        self.content[block, position % SIZE] = self.identity(seq, position, draft)

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "planner"):
            return
        self.planner.check()
        for seq in self.planner:
            for position in range(seq.kv_len):
                place = (seq.blocks[position // SIZE], position % SIZE)
                assert self.content[place] == self.identity(seq, position), "wrong KV is read"

    def teardown(self) -> None:
        """Left alone, every request gets its turn: nothing waits for ever."""
        if not hasattr(self, "planner"):
            return
        for owner in list(self.kept):
            self.pool.unpin(owner)
        for _ in range(2000):
            if not list(self.planner):
                break
            for seq in self.planner:
                if seq.phase is Phase.PULLING:
                    self.planner.pull_failed(seq.request_id)
            plan = self.planner.plan()
            for chunk in plan.chunks:
                self.planner.advance(chunk, 1 if chunk.samples else None)
                if chunk.samples and (chunk.seq.num_generated > 3 or len(chunk.seq.tokens) >= self.limit):
                    self.planner.remove(chunk.seq.request_id)
        assert not list(self.planner), "a request starves"
        assert self.pool.num_used == 0
        self.pool.check([])


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
