"""The engine's side of handoffs: leases it has given, pulls it has begun.

Called from the engine's thread only (but for `holds` and the counters). Translates sequences into claims and leases;
sockets are `kv_server.py`'s and `kv_puller.py`'s, blocks the planner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from omni_proxy.workers.engine.kv_puller import KvPuller
from omni_proxy.workers.engine.kv_server import Export, KvServer
from omni_proxy.workers.engine.leases import Claim, Layout, LeaseBook
from omni_proxy.workers.engine.pull import Pull
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import EngineConfig, Handoff

READ_GRACE_S: Final = 5.0
"""A lease that is being read lives at least this long after each read."""
PIECE_BYTES: Final = 1 << 20
"""Size of one message, in whole blocks."""


def blocks_per_piece(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


class Transfers:
    """KV leaving and entering one engine."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        block_bytes: int,
        export: Export,
        on_lease_ended: Callable[[str], None],
        on_pull_ended: Callable[[Pull], None],
    ) -> None:
        """The callbacks come from other threads. Binds the side channel: OSError if it cannot."""
        self._config = config
        self._layout = layout
        self._block_bytes = block_bytes
        self._host = config.advertise_host or config.host
        book = LeaseBook(config.engine_id, layout, config.kv_lease_s, READ_GRACE_S)
        self.server = KvServer(book, export, block_bytes, on_lease_ended, config.host, config.side_channel_port)
        self.puller = KvPuller(on_pull_ended)
        self._pulls: dict[str, tuple[Pull, Sequence]] = {}
        self.leases_expired = 0

    def start(self) -> None:
        self.server.start()
        self.puller.start()

    def stop(self) -> None:
        self.puller.stop()
        self.server.stop()

    @property
    def bytes_sent(self) -> int:
        return self.server.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.puller.bytes_received

    @property
    def completed(self) -> int:
        """Handoffs completed on either side."""
        return self.server.transfers + self.puller.transfers

    @property
    def failed(self) -> int:
        """Pulls that failed here, as the puller."""
        return self.puller.failures

    # -- as the keeper

    def offer(self, seq: Sequence) -> Handoff:
        """Lease the pinned prompt blocks of a sequence that has ended."""
        lease = self.server.grant(seq.request_id, tuple(seq.blocks), seq.prompt_len, seq.prompt_digest(seq.prompt_len))
        return Handoff(
            engine_id=self._config.engine_id,
            request_id=seq.request_id,
            host=self._host,
            port=self.server.port,
            block_ids=lease.block_ids,
            num_tokens=lease.num_tokens,
            cached_tokens=seq.cached_tokens,
            expires_in_s=self._config.kv_lease_s,
        )

    def holds(self, request_id: str) -> bool:
        """Whether a lease of this id lives. From any thread."""
        return self.server.holds(request_id)

    def end_lease(self, request_id: str) -> bool:
        return self.server.end(request_id)

    def expire_leases(self) -> list[str]:
        expired = self.server.expire()
        self.leases_expired += len(expired)
        return expired

    def next_expiry(self) -> float | None:
        return self.server.next_expiry()

    # -- as the puller

    def begin_pull(self, seq: Sequence) -> bool:
        """Pull the blocks that the cache lacks. False, and the keeper is told, when it lacks none."""
        source = seq.request.pull
        assert source is not None
        claim = self._claim(seq)
        first = seq.kv_len // seq.block_size
        if seq.kv_len >= source.num_tokens:
            self.puller.release(claim, source.host, source.port)
            return False
        pull = Pull(
            claim,
            first,
            blocks_per_piece(self._block_bytes),
            self._block_bytes,
            self._config.kv_pull_timeout_s,
            time.monotonic(),
        )
        self._pulls[seq.request_id] = (pull, seq)
        self.puller.start_pull(pull, source.host, source.port)
        return True

    def end_pull(self, pull: Pull) -> Sequence | None:
        """The sequence that a pull which has ended was for; None if it was abandoned meanwhile."""
        for request_id, (mine, seq) in self._pulls.items():
            if mine is pull:
                del self._pulls[request_id]
                return seq
        return None

    def abandon(self, seq: Sequence) -> None:
        """Nobody wants the KV that this sequence was to pull: stop, and let the keeper free it."""
        source = seq.request.pull
        assert source is not None
        entry = self._pulls.pop(seq.request_id, None)
        if entry is not None:
            self.puller.cancel(entry[0])
        self.puller.release(self._claim(seq), source.host, source.port)

    def _claim(self, seq: Sequence) -> Claim:
        source = seq.request.pull
        assert source is not None
        return Claim(
            source.engine_id,
            source.request_id,
            source.block_ids,
            source.num_tokens,
            seq.prompt_digest(source.num_tokens),
            self._layout,
        )
