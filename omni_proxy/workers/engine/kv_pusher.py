"""The sender's half of pushed handoffs at work: copies pieces out of the cache while the next layer is computed.

What may leave is the room book's decision; here are the lock, the clock and the wake-up. The engine's thread says what
it computes, the side channel's thread (`kv_server.py`) takes what is ready and owns the socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_kernels import StepProgress
from omni_proxy.workers.engine.inflow import parse_ask
from omni_proxy.workers.engine.kv_wire import pack
from omni_proxy.workers.engine.leases import Layout, Refusal
from omni_proxy.workers.engine.pull import Header, piece_crc
from omni_proxy.workers.engine.rooms import Outflow, Peer, Piece, RoomBook

Frames = tuple[Peer, list[bytes | memoryview]]
"""A message: to whom, and its header and bytes."""
ExportLayer = Callable[[int, Sequence[int]], memoryview]
"""Layer and block ids -> a copy of their bytes, block by block."""

KINDS = frozenset({"join", "ack", "again", "ping", "leave"})
"""Messages that are about rooms; `done` is when it names one."""


@dataclass(frozen=True, slots=True)
class Computing:
    """What one step computes of a room's prompt: tokens `valid .. until` into `blocks`."""

    request_id: str
    blocks: tuple[int, ...]
    valid: int
    until: int


class KvPusher:
    """The rooms of one engine. Methods of the engine's thread and of the side channel's are told apart below.

    The lock is held while a piece is copied: blocks are never read once `paused` or `close` has returned.
    """

    def __init__(
        self,
        layout: Layout,
        layers: int,
        block_size: int,
        wait_s: float,
        export: ExportLayer,
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` hears, from the side channel's thread, whose receiver has everything or has left."""
        self.progress = StepProgress()
        self.bytes_sent = 0
        self.transfers = 0
        self.hidden_s = self.exposed_s = 0.0
        """Time with pieces on the way, before and after the prompt was computed; of pushes that arrived."""
        self._book = RoomBook(layout, layers, block_size, wait_s)
        self._lock = threading.Lock()
        self._export = export
        self._on_end = on_end
        self._running: list[Outflow] = []
        """Rooms of which the running step computes a part."""
        self._outbox: list[Frames] = []

    # -- from the engine's thread, `open` and `holds` from any

    def holds(self, room: int) -> bool:
        with self._lock:
            return room in self._book

    def open(self, room: int, request_id: str, num_tokens: int, digest: str) -> bool:
        """A prefill leg has come; False if its room is in use."""
        now = time.monotonic()
        with self._lock:
            if room in self._book:
                return False
            waiting = self._book.open(room, request_id, num_tokens, digest, now)
            if waiting is not None:
                self._outbox.append(self._join(waiting[0], self._book.join(*waiting, now)))
        self.progress.wake()
        return True

    def is_open(self, request_id: str) -> bool:
        """Whether a receiver may still come for this request, or is not done with it."""
        with self._lock:
            return self._book.of(request_id) is not None

    def computing(self, parts: Sequence[Computing]) -> StepProgress | None:
        """A step begins; None if it computes nothing that has a room, else what the step must tell."""
        with self._lock:
            self._running = []
            for part in parts:
                flow = self._book.of(part.request_id)
                if flow is not None:
                    flow.computing(part.blocks, part.valid, part.until)
                    self._running.append(flow)
            self.progress.restart()
        return self.progress if self._running else None

    def computed(self) -> None:
        """The step has ended, well."""
        if not self._running:
            return
        now = time.monotonic()
        with self._lock:
            for flow in self._running:
                flow.computed(now)
            self._running = []
        self.progress.wake()

    def paused(self, request_id: str) -> None:
        """A prefill leg lost its blocks and will compute them again."""
        with self._lock:
            flow = self._book.of(request_id)
            if flow is not None:
                flow.paused()

    def close(self, request_id: str, reason: str) -> None:
        """No piece of a request leaves any more: its receiver, if it still waits, is told why."""
        with self._lock:
            flow = self._book.close(request_id, time.monotonic())
            if flow is None or flow.peer is None:
                return
            self._outbox.append(_refuse(flow.peer, f"room {flow.room}: {reason}"))
        self.progress.wake()

    # -- from the side channel's thread

    def handle(self, peer: Peer, header: Header) -> list[Frames]:
        """Take one message about a room; returns what to send at once."""
        now = time.monotonic()
        with self._lock:
            if header.get("kind") == "join":
                ask = parse_ask(header)
                answer = Refusal("malformed join") if ask is None else self._book.join(peer, ask, now)
                return [] if answer is None else [self._join(peer, answer)]
            if header.get("kind") == "leave":
                room = header.get("room")
                left = self._book.leave(peer, room, now) if isinstance(room, int) else None
            else:
                flow = self._book.get(header.get("room"), header.get("serial"))
                if flow is None or flow.peer != peer:
                    return [_refuse(peer, f"room {header.get('room')} is closed")] if _asks(header) else []
                left = self._go_on(flow, header, now)
                if left is None:
                    return [(peer, [pack({"kind": "alive", "serial": flow.serial})])] if _asks(header) else []
        if left is not None:
            self._on_end(left.request_id)
        return []

    def request_of(self, room: object) -> str | None:
        """Whose room this is; None if it is not open."""
        with self._lock:
            flow = self._book.get(room)
            return None if flow is None else flow.request_id

    def take(self) -> list[Frames]:
        """What may be sent now: answers, then pieces whose layers are computed."""
        with self._lock:
            frames, self._outbox = self._outbox, []
            layers = self.progress.layers
            for flow in self._running:
                flow.layers_done(layers)
            for flow in self._book:
                frames += [(piece.peer, self._frames(piece)) for piece in flow.take(time.monotonic())]
        return frames

    def _go_on(self, flow: Outflow, header: Header, now: float) -> Outflow | None:
        """A message of the room's receiver; returns the room if it is over with it."""
        seq = header.get("seq")
        match header.get("kind"):
            case "ack" if isinstance(seq, int):
                flow.acked(seq, now)
            case "again" if isinstance(seq, int):
                flow.again(seq)
            case "ping":
                flow.all_again()
            case "done":
                self._book.close(flow.request_id, now)
                self.transfers += 1
                self.hidden_s += flow.overlap.hidden_s
                self.exposed_s += flow.overlap.exposed_s
                return flow
        return None

    def _join(self, peer: Peer, answer: Outflow | Refusal | None) -> Frames:
        if isinstance(answer, Refusal):
            return _refuse(peer, answer.reason)
        assert answer is not None
        return peer, [pack({"kind": "joined", "serial": answer.serial})]

    def _frames(self, piece: Piece) -> list[bytes | memoryview]:
        payload = self._export(piece.layer, piece.block_ids)
        self.bytes_sent += len(payload)
        crc = piece_crc(piece.serial, piece.seq, piece.first, len(piece.block_ids), payload)
        header: Header = {"kind": "layer", "serial": piece.serial, "seq": piece.seq, "crc": crc}
        return [pack(header), payload]


def _asks(header: Header) -> bool:
    """Whether the receiver waits for an answer."""
    return header.get("kind") == "ping"


def _refuse(peer: Peer, reason: str) -> Frames:
    return peer, [pack({"kind": "refused", "reason": reason})]
