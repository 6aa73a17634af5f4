"""Which request of a workload is the next turn of which, and what a gateway could know of it beforehand. Pure."""

from __future__ import annotations

from itertools import count
from typing import Final

from omni_proxy.sim.workload import SimRequest, Workload

_APART: Final = 1 << 24
"""More blocks than a prompt has: keys of answers that no turn follows are numbered in ranges of this size."""


def next_turns(workload: Workload) -> dict[int, int]:
    """For each request that is followed by another turn, that turn.

    Where a workload does not say it (traces), the next turn is the first later request that has all whole blocks of
    the prompt, and more.
    """
    said = {r.after: number for number, r in enumerate(workload.requests) if r.after is not None}
    return said or _by_prefix(workload)


class NextTurns:
    """What a gateway foresees: by the id of a request, what its next turn begins with, until that is forgotten."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._foreseen: dict[str, SimRequest] = {}
        self._turns: dict[int, int] | None = None
        """Made when it is asked for first."""

    def __bool__(self) -> bool:
        """Is anything foreseen?"""
        return bool(self._foreseen)

    def __getitem__(self, rid: str) -> SimRequest:
        return self._foreseen[rid]

    def foresee(self, rid: str, number: int) -> SimRequest:
        """What the next turn of a request of the workload begins with, as a prompt; kept under the request's id."""
        if self._turns is None:
            self._turns = next_turns(self._workload)
        request = self._foreseen[rid] = foreseen(self._workload, number, self._turns.get(number))
        return request

    def forget(self, rid: str) -> None:
        """It is of no use any more, if it ever was foreseen."""
        self._foreseen.pop(rid, None)


def _by_prefix(workload: Workload) -> dict[int, int]:
    open_ends: dict[tuple[int, int], int] = {}
    """By the number of whole blocks and the last of them."""
    found: dict[int, int] = {}
    for number, request in enumerate(workload.requests):
        whole = request.full_blocks(workload.block_tokens)
        for blocks in range(len(whole) - 1, 0, -1):
            before = open_ends.pop((blocks, request.block_keys[blocks - 1]), None)
            if before is not None:
                found[before] = number
                break
        if whole:
            open_ends[len(whole), whole[-1]] = number
    return found


def foreseen(workload: Workload, number: int, following: int | None) -> SimRequest:
    """Prompt and answer of a request as the prompt that its next turn begins with."""
    request = workload.requests[number]
    tokens = request.prompt_tokens + request.output_tokens
    blocks = tokens // workload.block_tokens
    if following is not None and workload.requests[following].prompt_tokens >= tokens:
        keys = workload.requests[following].block_keys[:blocks]
    else:  # nobody will ask for the blocks of the answer
        keys = request.full_blocks(workload.block_tokens)
        own = count(-1 - number * _APART, -1)
        keys += tuple(next(own) for _ in range(blocks - len(keys)))
    return SimRequest(0.0, tokens, 1, keys)
