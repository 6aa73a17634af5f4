"""The home of a prompt: by its session, else by the beginning that it does not share with nearly everybody. Pure.

Gateways agree on homes without talking, except where a session could not go home: those who placed it tell the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from omni_proxy.apc.popularity import Popularity
from omni_proxy.apc.ring import Ring

MOST_SESSIONS: Final = 50_000


class Homes:
    """The ring, and what the traffic has in common."""

    def __init__(self) -> None:
        self._ring = Ring()
        self._popularity = Popularity()
        self._elsewhere: OrderedDict[str, str] = OrderedDict()
        """Where other gateways placed sessions last."""

    def placed_elsewhere(self, placed: Iterable[tuple[str, str]]) -> None:
        """Other gateways sent these sessions to these workers."""
        for session, worker in placed:
            self._elsewhere[session] = worker
            self._elsewhere.move_to_end(session)
        while len(self._elsewhere) > MOST_SESSIONS:
            self._elsewhere.popitem(last=False)

    def saw(self, keys: Sequence[int]) -> None:
        """A prompt came."""
        if keys:
            self._popularity.count(keys)

    def home(
        self, session: str, keys: Sequence[int], names: Sequence[str], load: Callable[[str], float], tokens: float
    ) -> str | None:
        """The worker that a prompt which nobody holds should go to; None: it has no home, or all are too busy."""
        key = session or self._popularity.own_part(keys)
        if key is None or len(names) < 2:
            return None
        return self._ring.home(str(key), names, load, tokens)

    def order(self, session: str, keys: Sequence[int], names: Sequence[str]) -> Iterator[str]:
        """The workers from a prompt's home on; none where it has no home."""
        key = session or self._popularity.own_part(keys)
        if key is not None and len(names) > 1:
            if session in self._elsewhere:
                yield self._elsewhere[session]
            yield from self._ring.order(str(key), names)
