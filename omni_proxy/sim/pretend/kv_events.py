"""KV events in vLLM's form over ZeroMQ: which blocks this worker has stored and evicted.

Three frames: topic, sequence (8 bytes, big endian), msgpack of [time, events, rank]. A ROUTER socket replays what a
subscriber has missed, from the last `KEPT` messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

KEPT: Final = 10_000
TOPIC: Final = b"kv-events"
_END: Final = (-1).to_bytes(8, "big", signed=True)


class PortTaken(Exception):
    """A socket cannot be bound; the text says where and why."""


class KvPublisher:
    """Publishes on `port` and replays on the port above it. Raises PortTaken."""

    def __init__(self, host: str, port: int, block_size: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waiting = zmq.asyncio.Context()
        try:
            self._events = _bound(self._context, zmq.PUB, host, port)
            self._replay = _bound(self._waiting, zmq.ROUTER, host, port + 1)
        except PortTaken:
            self._destroy()
            raise
        self._block_size = block_size
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._serving = asyncio.create_task(self._serve(), name="replay KV events")

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

    async def close(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._destroy()

    def _destroy(self) -> None:
        self._waiting.destroy(linger=0)
        self._context.destroy(linger=0)

    def _publish(self, event: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((sequence, payload))
        # PUB never blocks: it drops beyond its high-water mark.
        self._events.send_multipart([TOPIC, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def _serve(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._kept):
                if sequence >= start:
                    await self._replay.send_multipart([client, b"", TOPIC, sequence.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", _END, b""])


def _bound(context: Any, kind: int, host: str, port: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    try:
        socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError as exc:
        raise PortTaken(f"cannot listen on {host}:{port}: {exc}") from exc
    return socket
