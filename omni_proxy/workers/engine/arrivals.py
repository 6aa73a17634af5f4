"""KV that comes from other workers, to the sequences that wait for it. In the engine's thread.

How it comes is `handoff.py`'s; here it is put where it belongs, and what happens when it does not come.
"""

from __future__ import annotations

import logging

from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.handoff import Transfers
from omni_proxy.workers.engine.kv_puller import Transfer
from omni_proxy.workers.engine.outputs import say
from omni_proxy.workers.engine.planner import Planner
from omni_proxy.workers.engine.pull import Pull, PullState
from omni_proxy.workers.engine.runner import Runner
from omni_proxy.workers.engine.sequence import Phase, Sequence
from omni_proxy.workers.engine.stepper import Finish
from omni_proxy.workers.engine.types import FinishReason

log = logging.getLogger(__name__)


class Arrivals:
    """Begins the pulls of a plan and ends each of them once."""

    def __init__(
        self,
        planner: Planner,
        transfers: Transfers,
        runner: Runner,
        counters: Counters,
        block_bytes: int,
        recompute: bool,
        finish: Finish,
    ) -> None:
        """`recompute`: a sequence whose KV does not come is computed here; else it ends."""
        self._planner = planner
        self._transfers = transfers
        self._runner = runner
        self._counters = counters
        self._block_bytes = block_bytes
        self._recompute = recompute
        self._finish = finish

    def begin(self, seq: Sequence) -> None:
        """The sequence has got blocks for its KV."""
        if not self._transfers.begin_pull(seq):
            self._planner.pull_finished(seq.request_id)

    def ended(self, pull: Transfer) -> None:
        """All of it is there, or it has failed; nothing if the sequence has left meanwhile."""
        seq = self._transfers.end_pull(pull)
        if seq is None:
            return
        error = pull.error if pull.state is PullState.FAILED else self._import(seq, pull)
        if error is None:
            known = seq.cached_tokens
            self._planner.pull_finished(seq.request_id)
            self._counters.pulled(seq.cached_tokens - known)
        elif self._recompute:
            log.warning("KV %s for %s failed, recomputing: %s", seq.handoff_word, seq.request_id, error)
            self._planner.pull_failed(seq.request_id)
        else:
            self._finish(seq, FinishReason.ABANDONED, error=f"KV {seq.handoff_word} failed: {error}")

    def _import(self, seq: Sequence, pull: Transfer) -> str | None:
        """Put pulled bytes into the sequence's blocks (pushed ones are there); the reason if that fails."""
        if not isinstance(pull, Pull):
            return None
        assert seq.phase is Phase.PULLING
        place = pull.first
        try:
            for piece in pull.pieces:
                count = len(piece) // self._block_bytes
                self._runner.import_blocks(seq.blocks[place : place + count], piece)
                place += count
        except Exception as exc:
            log.exception("importing KV for %s failed", seq.request_id)
            return say(exc)
        return None
