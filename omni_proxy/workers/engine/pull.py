"""The puller's half of a KV handoff as a state machine without a socket. Pure.

```
puller (decode)                          keeper (prefill)
open   claim                        ->
                                    <-   opened  serial          | refused reason
read   serial, seq, first, count    ->                            (a window of reads at a time)
                                    <-   piece   serial, seq, first, count, crc + bytes | refused
done   serial                       ->                            (frees the blocks there)
```
A piece is `count` whole blocks. It counts once, when number, size and checksum are right; a wrong one is asked for
again, a second copy is ignored. The pull succeeds when every block is in, and not before.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Final
from zlib import crc32

from omni_proxy.workers.engine.leases import Claim
from omni_proxy.workers.engine.types import JsonValue

Header = dict[str, JsonValue]

WINDOW: Final = 4
"""Reads in flight: enough to keep a link busy while pieces are checked."""
MAX_BAD_PIECES: Final = 3


class PullState(Enum):
    OPENING = "opening"
    READING = "reading"
    DONE = "done"
    FAILED = "failed"


def piece_crc(serial: int, seq: int, first: int, count: int, payload: bytes | memoryview) -> int:
    """Checksum of a piece: its place and its bytes."""
    return crc32(payload, crc32(f"{serial}/{seq}/{first}/{count}".encode()))


def claim_header(kind: str, claim: Claim) -> Header:
    """A message of `kind` that names the lease it is about."""
    fields = asdict(claim)
    return {
        **fields,
        "kind": kind,
        "block_ids": list(claim.block_ids),
        "layout": dict(claim.layout),
    }


class Pull:
    """One pull of the lease's blocks `first ..`; the ones before are in the puller's cache already."""

    def __init__(
        self,
        claim: Claim,
        first: int,
        blocks_per_piece: int,
        block_bytes: int,
        timeout_s: float,
        now: float,
    ) -> None:
        assert first < len(claim.block_ids), "a pull of no blocks"
        self.claim = claim
        self.first = first
        self.state = PullState.OPENING
        self.error = ""
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        ends = len(claim.block_ids)
        self._spans = [(i, min(blocks_per_piece, ends - i)) for i in range(first, ends, blocks_per_piece)]
        self._pieces: dict[int, memoryview] = {}
        self._asked = 0
        self._bad = 0
        self._serial = 0
        self._progress_at = now
        self._asked_again = False

    @property
    def request_id(self) -> str:
        return self.claim.request_id

    @property
    def pieces(self) -> list[memoryview]:
        """The bytes of all blocks, in order. Only when DONE."""
        assert self.state is PullState.DONE
        return [self._pieces[i] for i in range(len(self._spans))]

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do if nothing is received before."""
        wait = self._timeout_s if self._asked_again else self._timeout_s / 2
        return self._progress_at + wait

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces that have come."""
        return sum(len(piece) for piece in self._pieces.values())

    def begin(self) -> list[Header]:
        return [claim_header("open", self.claim)]

    def cancelled(self) -> list[Header]:
        """What to say when nobody wants it any more: the keeper is told by `release`."""
        return []

    def receive(self, header: Header, payload: memoryview | None, now: float) -> list[Header]:
        """Take one message from the keeper; returns what to send. Messages after the end change nothing."""
        if self.state in (PullState.DONE, PullState.FAILED):
            return []
        match header.get("kind"), self.state:
            case "refused", _:
                return self._fail(f"refused: {header.get('reason')}")
            case "opened", PullState.OPENING:
                return self._opened(header, now)
            case "piece", PullState.READING:
                return self._piece(header, payload, now)
            case _:
                return []

    def tick(self, now: float) -> list[Header]:
        """Ask again half way through a silence, give up at its end."""
        if self.state in (PullState.DONE, PullState.FAILED) or now < self.next_tick:
            return []
        if self._asked_again:
            got, of = len(self._pieces), len(self._spans)
            return self._fail(f"no answer for {self._timeout_s:g} s ({got} of {of} pieces came)")
        self._asked_again = True
        if self.state is PullState.OPENING:
            return self.begin()
        return [self._read(i) for i in range(self._asked) if i not in self._pieces]

    def _opened(self, header: Header, now: float) -> list[Header]:
        serial = header.get("serial")
        if not isinstance(serial, int):
            return self._fail("the answer to open has no serial")
        self._serial = serial
        self.state = PullState.READING
        self._moved_on(now)
        return self._ask_more()

    def _piece(self, header: Header, payload: memoryview | None, now: float) -> list[Header]:
        seq = header.get("seq")
        known = isinstance(seq, int) and 0 <= seq < self._asked
        if not known or not isinstance(seq, int) or header.get("serial") != self._serial:
            return []
        if seq in self._pieces:
            return []
        if payload is None or not self._is_right(seq, header, payload):
            return self._bad_piece(seq)
        self._pieces[seq] = payload
        self._moved_on(now)
        if len(self._pieces) < len(self._spans):
            return self._ask_more()
        self.state = PullState.DONE
        return [{"kind": "done", "request_id": self.request_id, "serial": self._serial}]

    def _is_right(self, seq: int, header: Header, payload: memoryview) -> bool:
        first, count = self._spans[seq]
        placed = header.get("first") == first and header.get("count") == count
        whole = len(payload) == count * self._block_bytes
        crc = piece_crc(self._serial, seq, first, count, payload)
        return placed and whole and header.get("crc") == crc

    def _bad_piece(self, seq: int) -> list[Header]:
        self._bad += 1
        if self._bad >= MAX_BAD_PIECES:
            return self._fail(f"{self._bad} pieces had a wrong size or checksum")
        return [self._read(seq)]

    def _ask_more(self) -> list[Header]:
        """Keep `WINDOW` reads in flight."""
        until = min(len(self._spans), len(self._pieces) + WINDOW)
        reads = [self._read(i) for i in range(self._asked, until)]
        self._asked = max(self._asked, until)
        return reads

    def _read(self, seq: int) -> Header:
        first, count = self._spans[seq]
        return {
            "kind": "read",
            "request_id": self.request_id,
            "serial": self._serial,
            "seq": seq,
            "first": first,
            "count": count,
        }

    def _moved_on(self, now: float) -> None:
        self._progress_at = now
        self._asked_again = False

    def give_up(self, why: str) -> None:
        """Fail for a reason that lies outside of the protocol."""
        self._fail(why)

    def _fail(self, why: str) -> list[Header]:
        self.state = PullState.FAILED
        self.error = why
        self._pieces.clear()
        return []
