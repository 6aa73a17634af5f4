"""The sender's half of pushed handoffs: who wants which prompt, what of it is computed, what is on the way. Pure.

A room is where two legs of one request meet; either may come first. The prefill leg opens it with its prompt, the
decode leg joins it with what it wants, and pieces leave as soon as their layer is computed, a window at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from omni_proxy.workers.engine.inflow import Ask
from omni_proxy.workers.engine.leases import Layout, Refusal
from omni_proxy.workers.engine.pieces import PieceGrid

WINDOW: Final = 8
"""Pieces on the way to one receiver: enough to keep a link busy while they are checked and copied."""
MAX_EARLY: Final = 4096
"""Joins that are kept for rooms still to be opened; the oldest is forgotten."""

Peer = bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece that may leave now: bytes of `block_ids` in `layer`, blocks `first ..` of the prompt."""

    peer: Peer
    serial: int
    seq: int
    layer: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Time with pieces on the way: while the prompt was still being computed, and after."""

    hidden_s: float
    exposed_s: float


class Outflow:
    """One room that a prefill leg has opened.

    Tokens below `valid` are computed in all layers, those below `until` in the first `layers_done` of a running step.
    """

    def __init__(self, room: int, serial: int, request_id: str, num_tokens: int, digest: str, block_size: int) -> None:
        self.room = room
        self.serial = serial
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.digest = digest
        self.peer: Peer | None = None
        self._size = block_size
        self._grid = PieceGrid(0, 0, 0, 1)
        self._blocks: tuple[int, ...] = ()
        self._valid = self._until = self._layers_done = 0
        self._unsent: list[list[int]] = []
        """By layer, its pieces still to be sent, the first one last."""
        self._resend: list[int] = []
        self._on_the_way: OrderedDict[int, None] = OrderedDict()
        self._busy_since: float | None = None
        self._computed_at: float | None = None
        self._hidden_s = self._exposed_s = 0.0

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self._size)

    @property
    def overlap(self) -> Overlap:
        return Overlap(self._hidden_s, self._exposed_s)

    # -- the receiver

    def join(self, peer: Peer, grid: PieceGrid) -> None:
        """Take a receiver on, or the same one again after its first word or our answer was lost."""
        if self.peer == peer and grid == self._grid:
            return
        self.peer, self._grid = peer, grid
        spans = grid.spans
        self._unsent = [list(range((at + 1) * spans - 1, at * spans - 1, -1)) for at in range(grid.layers)]
        self._on_the_way.clear()
        self._resend.clear()

    def acked(self, seq: int, now: float) -> None:
        """A piece has arrived."""
        if self._on_the_way.pop(seq, True) is None and not self._on_the_way:
            self._idle(now)

    def again(self, seq: int) -> None:
        """A piece has to go once more."""
        if seq in self._on_the_way and seq not in self._resend:
            self._resend.append(seq)

    def all_again(self) -> None:
        """Whatever is on the way may be lost: it goes once more."""
        self._resend = list(self._on_the_way)

    def ended(self, now: float) -> None:
        """The receiver has everything, or has left."""
        self._on_the_way.clear()
        self._resend.clear()
        self._unsent = []
        self._idle(now)

    # -- the prompt

    def computing(self, blocks: tuple[int, ...], valid: int, until: int) -> None:
        """A step begins that computes tokens `valid .. until`, layer by layer, into `blocks`."""
        self._blocks, self._valid, self._until = blocks, valid, until
        self._layers_done = 0
        self._computed_at = None

    def layers_done(self, layers: int) -> None:
        self._layers_done = layers

    def computed(self, now: float) -> None:
        """The step has ended."""
        self._valid = max(self._valid, self._until)
        self._layers_done = 0
        if self._valid >= self.num_tokens:
            self._computed_at = now

    def paused(self) -> None:
        """The blocks are taken away: nothing may be read until the next step."""
        self._blocks = ()
        self._valid = self._until = self._layers_done = 0

    # -- what leaves

    def take(self, now: float) -> Iterator[Piece]:
        """Pieces that may leave now, counted as on the way once taken."""
        if self.peer is None or not self._blocks:
            return
        while self._resend:
            yield self._piece(self._resend.pop(0))
        for layer, pieces in enumerate(self._unsent):
            ready = self._ready_blocks(layer)
            while pieces and len(self._on_the_way) < WINDOW:
                _, first, count = self._grid.place(pieces[-1])
                if first + count > ready:
                    break
                seq = pieces.pop()
                if self._busy_since is None:
                    self._busy_since = now
                self._on_the_way[seq] = None
                yield self._piece(seq)

    def _ready_blocks(self, layer: int) -> int:
        """Leading blocks that are whole in a layer; the prompt's last one is when its last token is."""
        tokens = self._until if layer < self._layers_done else self._valid
        return self.num_blocks if tokens >= self.num_tokens else tokens // self._size

    def _piece(self, seq: int) -> Piece:
        layer, first, count = self._grid.place(seq)
        assert self.peer is not None
        return Piece(self.peer, self.serial, seq, layer, first, self._blocks[first : first + count])

    def _idle(self, now: float) -> None:
        if self._busy_since is None:
            return
        turn = now if self._computed_at is None else min(max(self._computed_at, self._busy_since), now)
        self._hidden_s += turn - self._busy_since
        self._exposed_s += now - turn
        self._busy_since = None


class RoomBook:
    """All rooms of one sender, and the joins that came before their room was opened."""

    def __init__(self, layout: Layout, layers: int, block_size: int, wait_s: float) -> None:
        """`wait_s`: how long an early join is remembered."""
        self._layout = dict(layout)
        self._layers = layers
        self._block_size = block_size
        self._wait_s = wait_s
        self._rooms: dict[int, Outflow] = {}
        self._by_request: dict[str, int] = {}
        self._early: OrderedDict[int, tuple[float, Peer, Ask | None]] = OrderedDict()
        """Joins, or None for a receiver that has left already."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def __iter__(self) -> Iterator[Outflow]:
        return iter(self._rooms.values())

    @property
    def num_early(self) -> int:
        return len(self._early)

    def get(self, room: object, serial: object = None) -> Outflow | None:
        """The open room, of this serial if one is given."""
        flow = self._rooms.get(room) if isinstance(room, int) else None
        return flow if flow is not None and serial in (None, flow.serial) else None

    def of(self, request_id: str) -> Outflow | None:
        room = self._by_request.get(request_id)
        return None if room is None else self._rooms[room]

    def open(self, room: int, request_id: str, num_tokens: int, digest: str, now: float) -> tuple[Peer, Ask] | None:
        """A prefill leg opens its room; whoever waits there is returned and then joins as if it came now.

        The room must not be open. A receiver that has left before closes the room at once.
        """
        assert room not in self._rooms
        assert request_id not in self._by_request
        self._forget_early(now)
        early = self._early.pop(room, None)
        if early is not None and early[2] is None:
            return None
        self._serial += 1
        self._rooms[room] = Outflow(room, self._serial, request_id, num_tokens, digest, self._block_size)
        self._by_request[request_id] = room
        return None if early is None or early[2] is None else (early[1], early[2])

    def join(self, peer: Peer, ask: Ask, now: float) -> Outflow | Refusal | None:
        """The room that a receiver has joined, why it may not, or None while the room is not open yet."""
        for name, mine in self._layout.items():
            theirs = ask.layout.get(name)
            if theirs != mine:
                return Refusal(f"KV layouts differ: {name} is {mine} here and {theirs} there")
        flow = self._rooms.get(ask.room)
        if flow is None:
            self._keep_early(ask.room, peer, ask, now)
            return None
        if ask.num_tokens != flow.num_tokens:
            return Refusal(f"room {ask.room} has a prompt of {flow.num_tokens} tokens, not {ask.num_tokens}")
        if ask.prompt_digest != flow.digest:
            return Refusal(f"room {ask.room} has another prompt or cache salt")
        problem = ask.grid.problem(flow.num_blocks, self._layers)
        if problem is not None:
            return Refusal(f"room {ask.room}: {problem}")
        if flow.peer not in (None, peer):
            return Refusal(f"room {ask.room} has a receiver already")
        flow.join(peer, ask.grid)
        return flow

    def leave(self, peer: Peer, room: int, now: float) -> Outflow | None:
        """The receiver has left, or never will come; its room is closed. None if it was not open."""
        flow = self._rooms.get(room)
        if flow is None:
            self._keep_early(room, peer, None, now)
            return None
        if flow.peer not in (None, peer):
            return None
        return self.close(flow.request_id, now)

    def close(self, request_id: str, now: float) -> Outflow | None:
        """End the room of a request; None if it has none."""
        room = self._by_request.pop(request_id, None)
        if room is None:
            return None
        flow = self._rooms.pop(room)
        flow.ended(now)
        return flow

    def _keep_early(self, room: int, peer: Peer, ask: Ask | None, now: float) -> None:
        self._forget_early(now)
        kept = self._early.get(room)
        if kept is not None and kept[1] != peer and kept[2] is not None and ask is not None:
            return  # the first to come has the room
        self._early[room] = (now + self._wait_s, peer, ask)
        self._early.move_to_end(room)
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _forget_early(self, now: float) -> None:
        while self._early:
            room, (until, _, _) = next(iter(self._early.items()))
            if until > now:
                return
            del self._early[room]
