"""The engine's side of handoffs: leases it has given, pulls it has begun.

Called from the engine's thread only (but for `holds` and the counters). Translates sequences into claims and leases;
sockets are `kv_server.py`'s and `kv_puller.py`'s, blocks the planner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Blocks
from typing import Final, Protocol

from omni_proxy.workers.engine.inflow import Ask, Inflow
from omni_proxy.workers.engine.kv_puller import KvPuller, Transfer
from omni_proxy.workers.engine.kv_pusher import KvPusher
from omni_proxy.workers.engine.kv_server import KvServer
from omni_proxy.workers.engine.layer_sink import LayerSink
from omni_proxy.workers.engine.leases import Claim, Layout, LeaseBook
from omni_proxy.workers.engine.pieces import PieceGrid, blocks_per_push
from omni_proxy.workers.engine.pull import Header, Pull, claim_header
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import EngineConfig, Handoff

READ_GRACE_S: Final = 5.0
"""A lease that is being read lives at least this long after each read."""
PIECE_BYTES: Final = 1 << 20
"""Size of one message, in whole blocks."""


def blocks_per_piece(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


class CacheAccess(Protocol):
    """Bytes of the KV cache; what they mean is the runner's business."""

    def export_bytes(self, blocks: Blocks[int], /) -> memoryview: ...
    def export_layer(self, layer: int, blocks: Blocks[int], /) -> memoryview: ...
    def import_layer(self, layer: int, blocks: Blocks[int], data: memoryview, /) -> None: ...


class Transfers:
    """KV leaving and entering one engine."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        block_bytes: int,
        cache: CacheAccess,
        on_lease_ended: Callable[[str], None],
        on_pull_ended: Callable[[Transfer], None],
    ) -> None:
        """The callbacks come from other threads. Binds the side channel: OSError if it cannot."""
        self._config = config
        self._layout = layout
        self._block_bytes = block_bytes
        self._host = config.advertise_host or config.host
        book = LeaseBook(config.engine_id, layout, config.kv_lease_s, READ_GRACE_S)
        self._layers = int(layout["layers"])
        self._import_layer = cache.import_layer
        self.pusher = KvPusher(
            layout, self._layers, config.block_size, config.kv_pull_timeout_s, cache.export_layer, on_lease_ended
        )
        self.server = KvServer(
            book, cache.export_bytes, block_bytes, on_lease_ended, config.host, config.side_channel_port, self.pusher
        )
        self.puller = KvPuller(on_pull_ended)
        self._pulls: dict[str, tuple[Transfer, Sequence]] = {}
        self._sinks: dict[str, LayerSink] = {}
        self.leases_expired = 0

    def start(self) -> None:
        self.server.start()
        self.puller.start()

    def stop(self) -> None:
        self.puller.stop()
        self.server.stop()

    @property
    def bytes_sent(self) -> int:
        return self.server.bytes_sent + self.pusher.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.puller.bytes_received

    @property
    def completed(self) -> int:
        """Handoffs completed on either side."""
        return self.server.transfers + self.pusher.transfers + self.puller.transfers

    @property
    def failed(self) -> int:
        """Pulls that failed here, as the puller."""
        return self.puller.failures

    @property
    def push_hidden_s(self) -> float:
        """Time with pieces on the way while their prompt was still being computed."""
        return self.pusher.hidden_s

    @property
    def push_exposed_s(self) -> float:
        """Time with pieces on the way after their prompt was computed."""
        return self.pusher.exposed_s

    @property
    def pushes(self) -> int:
        """Prompts pushed to the last piece."""
        return self.pusher.transfers

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
        """Get the blocks that the cache lacks. False, and the keeper is told, when it lacks none."""
        first = seq.kv_len // seq.block_size
        if seq.kv_len >= seq.pulled_tokens:
            self._tell_unwanted(seq)
            return False
        transfer = self._inflow(seq, first) if seq.request.join is not None else self._pull(seq, first)
        self._pulls[seq.request_id] = (transfer, seq)
        self.puller.start_pull(transfer, *self._source(seq))
        return True

    def end_pull(self, transfer: Transfer) -> Sequence | None:
        """The sequence that a transfer which has ended was for; None if it was abandoned meanwhile."""
        for request_id, (mine, seq) in self._pulls.items():
            if mine is transfer:
                del self._pulls[request_id]
                self._close_sink(request_id)
                return seq
        return None

    def abandon(self, seq: Sequence) -> None:
        """Nobody wants the KV that this sequence was to get: stop, and let the keeper free it."""
        entry = self._pulls.pop(seq.request_id, None)
        if entry is not None:
            self.puller.cancel(entry[0])
            self._close_sink(seq.request_id)
        if entry is None or seq.request.join is None:
            self._tell_unwanted(seq)

    def _pull(self, seq: Sequence, first: int) -> Pull:
        piece, timeout = blocks_per_piece(self._block_bytes), self._config.kv_pull_timeout_s
        return Pull(self._claim(seq), first, piece, self._block_bytes, timeout, time.monotonic())

    def _inflow(self, seq: Sequence, first: int) -> Inflow:
        join = seq.request.join
        assert join is not None
        size = self._block_bytes // self._layers
        grid = PieceGrid(self._layers, first, seq.blocks_for(seq.prompt_len), blocks_per_push(size))
        ask = Ask(join.room, seq.prompt_len, seq.prompt_digest(seq.prompt_len), self._layout, grid)
        sink = self._sinks[seq.request_id] = LayerSink(self._import_layer, tuple(seq.blocks))
        return Inflow(seq.request_id, ask, size, self._config.kv_pull_timeout_s, time.monotonic(), sink)

    def _close_sink(self, request_id: str) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink.close()

    def _tell_unwanted(self, seq: Sequence) -> None:
        join = seq.request.join
        header: Header = (
            claim_header("release", self._claim(seq)) if join is None else {"kind": "leave", "room": join.room}
        )
        self.puller.tell(header, *self._source(seq))

    def _source(self, seq: Sequence) -> tuple[str, int]:
        """Where the other side of a sequence's handoff is."""
        source = seq.request.join or seq.request.pull
        assert source is not None
        return source.host, source.port

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
