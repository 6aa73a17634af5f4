"""What the prefix cache stored and forgot since the last message, in vLLM's words. Pure.

One batch is the array `[time, [event ...], rank]`, each event a map with its `type`: what vLLM 0.32 sends. Blocks carry
their tokens and their parent, so that a reader needs to know nothing of how this engine names blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omni_proxy.workers.engine.blocks import Key

MEDIUM: Final = "GPU"
"""vLLM's word for the tier that the model computes on, also where that is a CPU."""


class CacheLog:
    """Events in the order in which they happened; the cache and the planner write, whoever publishes takes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[dict[str, Any]] = []
        self._encoder = msgspec.msgpack.Encoder()

    def stored(self, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str) -> None:
        """Blocks that follow one another can be found now. `parent` is None for the first blocks of a prompt."""
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [event_hash(key) for key in keys],
            "parent_block_hash": None if parent is None else event_hash(parent),
            "token_ids": list(tokens),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        if salt and parent is None:
            event["extra_keys"] = [[salt], *[None] * (len(keys) - 1)]
        self._events.append(event)

    def removed(self, key: Key) -> None:
        """A block's content was forgotten."""
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockRemoved":
            last["block_hashes"].append(event_hash(key))
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": [event_hash(key)], "medium": MEDIUM})

    def cleared(self) -> None:
        """All content was forgotten."""
        self._events.append({"type": "AllBlocksCleared"})

    def take(self, wall_time: float) -> bytes | None:
        """What has been written since the last time, as one message; None for nothing. `wall_time`: seconds."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return self._encoder.encode([wall_time, events, 0])


def event_hash(key: Key) -> int:
    """A block's name in events: 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")
