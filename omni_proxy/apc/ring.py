"""The home of a prompt that nobody holds: a consistent-hash ring, so that replicas of the gateway agree. Pure.

A home is taken unless it is too busy (bounded load); then the next on the ring is asked, in an order that depends on
the key and the members only. Loads are tokens; who asks knows them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VIRTUAL_NODES: Final = 160
BOUND: Final = 1.25
"""A home may carry this much more than the mean."""
_MOST_RINGS: Final = 64


class Ring:
    """Rings over the sets of workers that were asked for lately."""

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        self._virtual_nodes = virtual_nodes
        self._rings: OrderedDict[tuple[str, ...], HashRing] = OrderedDict()

    def order(self, key: str, names: Sequence[str]) -> Iterator[str]:
        """All names, the home first, then the order of spilling."""
        members = tuple(names)
        ring = self._rings.get(members)
        if ring is None:
            ring = HashRing(nodes=list(members), vnodes=self._virtual_nodes, hash_fn=_hash)
            self._rings[members] = ring
            if len(self._rings) > _MOST_RINGS:
                self._rings.popitem(last=False)
        self._rings.move_to_end(members)
        nodes: Iterator[str] = ring.iterate_nodes(key)
        return nodes

    def home(self, key: str, names: Sequence[str], load: Callable[[str], float], tokens: float) -> str | None:
        """The first in order that may take `tokens` more; None when all are past the bound."""
        bound = BOUND * (sum(map(load, names)) + tokens) / len(names)
        bound = max(bound, tokens)  # an idle worker takes a prompt of any length
        return next((name for name in self.order(key, names) if load(name) + tokens <= bound), None)


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode())
