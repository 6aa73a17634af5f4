"""KV events of a pretending worker: what it has stored and evicted, in vLLM's form, over the engine's own publisher."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from omni_proxy.workers.engine.kv_events import KvEventPublisher


class KvEvents:
    """Publishes on `port`. Raises OSError when it is taken."""

    def __init__(self, host: str, port: int, block_size: int) -> None:
        self._publisher = KvEventPublisher(host, port)
        self._publisher.start()
        self._block_size = block_size

    def stored(self, keys: Sequence[int], parent: int | None, tokens: Sequence[int]) -> None:
        """A run of blocks of one prompt; `tokens` are all of theirs."""
        self._publish(
            {
                "type": "BlockStored",
                "block_hashes": list(keys),
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        )

    def removed(self, keys: Sequence[int]) -> None:
        """Blocks that made room."""
        self._publish({"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU"})

    def cleared(self) -> None:
        """The whole cache was emptied."""
        self._publish({"type": "AllBlocksCleared"})

    def sources(self) -> list[dict[str, Any]]:
        """What `/kv_event_sources` says."""
        return [self._publisher.source()]

    def close(self) -> None:
        """Publish nothing more."""
        self._publisher.stop()

    def _publish(self, event: dict[str, Any]) -> None:
        self._publisher.send(msgspec.msgpack.encode([time.time(), [event], 0]))
