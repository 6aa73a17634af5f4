"""What a client's connection may be: how large, how slow, how many. Plain numbers; the protocol enforces them."""

from __future__ import annotations


class Bounds:
    """Of one request of a connection, as in the config's `limits` and `timeouts`.

    `head_s`: from its first byte to the end of its head. `body_s`: between two parts of its body. `bytes_per_s`: on the
    average from `body_s` on; 0: any.
    """

    __slots__ = ("body_bytes", "body_s", "bytes_per_s", "head_bytes", "head_s", "headers")

    def __init__(
        self,
        body_bytes: int,
        head_bytes: int = 64 << 10,
        headers: int = 100,
        head_s: float = 30.0,
        body_s: float = 60.0,
        bytes_per_s: int = 500,
    ) -> None:
        self.body_bytes = body_bytes
        self.head_bytes = head_bytes
        self.headers = headers
        self.head_s = head_s
        self.body_s = body_s
        self.bytes_per_s = bytes_per_s

    def too_slow(self, in_head: bool, for_s: float, got_bytes: int) -> bool:
        """Has a request that began so long ago kept us waiting for too long?"""
        if in_head:
            return for_s > self.head_s
        return (for_s - self.body_s) * self.bytes_per_s > got_bytes


class Crowd:
    """Connections by address. `most` None: any number."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._open: dict[str, int] = {}

    def enter(self, peer: str) -> bool:
        """Count a connection; False: there are too many from that address."""
        count = self._open[peer] = self._open.get(peer, 0) + 1
        return self.most is None or count <= self.most

    def leave(self, peer: str) -> None:
        """A connection that was counted has ended."""
        count = self._open.get(peer, 1) - 1
        if count > 0:
            self._open[peer] = count
        else:
            self._open.pop(peer, None)
