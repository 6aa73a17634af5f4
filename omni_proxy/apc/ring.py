"""A consistent-hash ring over workers, so that replicas of the gateway agree. Pure.

The order in which workers are asked depends on the key and the members only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VIRTUAL_NODES: Final = 160
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


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode())
