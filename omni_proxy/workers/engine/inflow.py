"""The receiver's half of a pushed handoff as a state machine without a socket. Pure.

```
receiver (decode)                           sender (prefill)
join   room, what is wanted            ->   kept until the room's prompt arrives
                                       <-   joined  serial              | refused  reason
                                       <-   layer   serial, seq, crc + bytes   (as layers are computed)
ack    serial, seq                     ->   (lets the next ones go)
again  serial, seq                     ->   (a piece that was damaged)
ping   serial                          ->   (half way through a silence: what is on the way goes again)
                                       <-   alive   serial
done   room, serial                    ->   (frees the blocks there)
leave  room                            ->   (nobody will read)
```
A piece counts once, when its place, size and checksum are right, and is handed to `sink` at once: it is copied while
the sender computes the next layer. The push succeeds when every piece is in, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omni_proxy.workers.engine.leases import Layout
from omni_proxy.workers.engine.pieces import PieceGrid
from omni_proxy.workers.engine.pull import MAX_BAD_PIECES, Header, PullState, piece_crc

Sink = Callable[[int, int, int, memoryview], None]
"""(layer, first block of the prompt, number of blocks, bytes): put a piece into the cache."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a receiver says when it joins a room; the sender's prompt must be the same."""

    room: int
    num_tokens: int
    prompt_digest: str
    layout: Layout
    grid: PieceGrid


def ask_header(ask: Ask) -> Header:
    grid = ask.grid
    return {
        "kind": "join",
        "room": ask.room,
        "num_tokens": ask.num_tokens,
        "prompt_digest": ask.prompt_digest,
        "layout": dict(ask.layout),
        "grid": [grid.layers, grid.first, grid.blocks, grid.per_piece],
    }


def parse_ask(header: Header) -> Ask | None:
    """An ask as `ask_header` writes it; None for anything else."""
    room, tokens, digest = (header.get(name) for name in ("room", "num_tokens", "prompt_digest"))
    layout, grid = header.get("layout"), header.get("grid")
    if not isinstance(room, int) or not isinstance(tokens, int) or not isinstance(digest, str):
        return None
    if not isinstance(layout, dict) or not isinstance(grid, list) or len(grid) != 4:
        return None
    numbers = [n for n in grid if type(n) is int]
    if len(numbers) != 4:
        return None
    shape = {k: v for k, v in layout.items() if isinstance(v, str | int)}
    return Ask(room, tokens, digest, shape, PieceGrid(*numbers))


class Inflow:
    """One push that is being received."""

    def __init__(self, request_id: str, ask: Ask, layer_block_bytes: int, timeout_s: float, now: float, sink: Sink):
        """`layer_block_bytes`: of one block in one layer. `timeout_s`: the silence after which the push has failed."""
        self.request_id = request_id
        self.state = PullState.OPENING
        self.error = ""
        self.num_bytes = 0
        """Bytes of all pieces that have been taken."""
        self._ask = ask
        self._block_bytes = layer_block_bytes
        self._timeout_s = timeout_s
        self._sink = sink
        self._missing = set(range(ask.grid.count))
        self._bad = 0
        self._serial = 0
        self._progress_at = now
        self._asked_again = False

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do if nothing is received before."""
        return self._progress_at + (self._timeout_s if self._asked_again else self._timeout_s / 2)

    @property
    def over(self) -> bool:
        return self.state in (PullState.DONE, PullState.FAILED)

    def begin(self) -> list[Header]:
        return [ask_header(self._ask)]

    def receive(self, header: Header, payload: memoryview | None, now: float) -> list[Header]:
        """Take one message from the sender; returns what to send. Messages after the end change nothing."""
        if self.over:
            return []
        match header.get("kind"), self.state:
            case "refused", _:
                return self._fail(f"refused: {header.get('reason')}")
            case "joined", PullState.OPENING:
                return self._joined(header, now)
            case "layer", PullState.READING if header.get("serial") == self._serial:
                return self._piece(header, payload, now)
            case "alive", PullState.READING if header.get("serial") == self._serial:
                self._moved_on(now)
        return []

    def tick(self, now: float) -> list[Header]:
        """Ask again half way through a silence, give up at its end."""
        if self.over or now < self.next_tick:
            return []
        if self._asked_again:
            got, of = self._ask.grid.count - len(self._missing), self._ask.grid.count
            return self._fail(f"no sign of the prefill worker for {self._timeout_s:g} s ({got} of {of} pieces came)")
        self._asked_again = True
        if self.state is PullState.OPENING:
            return self.begin()
        return [self._say("ping")]

    def cancelled(self) -> list[Header]:
        """What to say when nobody wants it any more."""
        return [] if self.over else [self._say("leave")]

    def give_up(self, why: str) -> None:
        """Fail for a reason that lies outside of the protocol."""
        self._fail(why)

    def _joined(self, header: Header, now: float) -> list[Header]:
        serial = header.get("serial")
        if not isinstance(serial, int):
            return self._fail("the answer to join has no serial")
        self._serial = serial
        self.state = PullState.READING
        self._moved_on(now)
        return []

    def _piece(self, header: Header, payload: memoryview | None, now: float) -> list[Header]:
        seq = header.get("seq")
        if type(seq) is not int or not 0 <= seq < self._ask.grid.count:
            return []
        self._moved_on(now)
        if seq not in self._missing:
            return [self._say("ack", seq)]
        layer, first, count = self._ask.grid.place(seq)
        whole = payload is not None and len(payload) == count * self._block_bytes
        if payload is None or not whole or header.get("crc") != piece_crc(self._serial, seq, first, count, payload):
            return self._bad_piece(seq)
        self._sink(layer, first, count, payload)
        self._missing.discard(seq)
        self.num_bytes += len(payload)
        if self._missing:
            return [self._say("ack", seq)]
        self.state = PullState.DONE
        return [self._say("done")]

    def _bad_piece(self, seq: int) -> list[Header]:
        self._bad += 1
        if self._bad >= MAX_BAD_PIECES:
            return self._fail(f"{self._bad} pieces had a wrong size or checksum")
        return [self._say("again", seq)]

    def _say(self, kind: str, seq: int | None = None) -> Header:
        header: Header = {"kind": kind, "room": self._ask.room, "serial": self._serial}
        return header if seq is None else {**header, "seq": seq}

    def _moved_on(self, now: float) -> None:
        self._progress_at = now
        self._asked_again = False

    def _fail(self, why: str) -> list[Header]:
        self.state = PullState.FAILED
        self.error = why
        return [self._say("leave")]
