"""Two small engines under random prompts, handoffs, aborts, releases and short leases: right tokens or a clear end."""

from __future__ import annotations

import random
from pathlib import Path

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import FinishReason
from tests.workers.engine.helpers import Call, generate, prompt, pull_from, request, running, until

ROUNDS = 60


class Storm:
    """Random callers of a prefill and a decode engine, against what one quiet engine says."""

    def __init__(self, p: Engine, d: Engine, quiet: Engine, seed: int) -> None:
        self.p, self.d, self.quiet = p, d, quiet
        self.random = random.Random(seed)
        self.prompts = [prompt(n, seed=n % 3) for n in (3, 9, 16, 21, 34)]
        self.want = [generate(quiet, f"want-{i}", tokens, 6) for i, tokens in enumerate(self.prompts)]
        self.calls: list[tuple[Call, int]] = []
        self.count = 0

    def round(self) -> None:
        """One caller does something."""
        self.count += 1
        which = self.random.randrange(len(self.prompts))
        tokens, name = self.prompts[which], f"r{self.count}"
        priority = self.random.randrange(2)
        match self.random.choice(["local", "local", "handoff", "handoff", "handoff", "abandoned", "abort"]):
            case "local":
                self.calls.append((Call(self.d, request(name, tokens, 6, priority=priority)), which))
            case "abort":
                self.calls.append((Call(self.d, request(name, tokens, 6, priority=priority)), which))
                self.d.abort(self.random.choice(self.calls)[0].asked.request_id)
            case "abandoned":
                Call(self.p, request(name, tokens, 1, keep_kv=True)).end()
                if self.random.random() < 0.5:
                    self.p.release(name)
            case "handoff":
                handoff = Call(self.p, request(name, tokens, 1, keep_kv=True)).end().handoff
                source = pull_from(handoff)
                self.calls.append((Call(self.d, request(name, tokens, 6, pull=source)), which))
                if self.random.random() < 0.2:
                    self.d.abort(name)

    def settle(self) -> None:
        for call, which in self.calls:
            last = call.end()
            if last.finish_reason is FinishReason.LENGTH:
                assert call.tokens == self.want[which]
            elif last.finish_reason is FinishReason.ERROR:
                assert "no KV is kept" in (last.error or "")  # its lease was over before its turn came
        for engine in (self.p, self.d):
            until(lambda engine=engine: engine.stats().blocks_used == 0, "every block comes home")  # type: ignore[misc]


def test_a_storm_loses_no_block_and_draws_no_wrong_token(tied: Path) -> None:
    small = {"kv_cache_bytes": 24 * 2048, "kv_lease_s": 0.3, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    with (
        running(tied, engine_id="P", **small) as p,
        running(tied, engine_id="D", **small) as d,
        running(tied, engine_id="Q") as quiet,
    ):
        storm = Storm(p, d, quiet, seed=5)
        for _ in range(ROUNDS):
            storm.round()
        storm.settle()
        ends = d.stats().requests_finished
        assert ends["length"] > ROUNDS / 3
        assert sum(ends.values()) == len(storm.calls)
