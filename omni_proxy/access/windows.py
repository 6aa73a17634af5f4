"""Counts of the last minute, shared by the fronts of a gateway without a lock. Pure: time comes in as `now`.

Of each tenant each front has a row of eight integers that nobody else writes; a limit is compared with the sum of all
rows. So no front waits for another, and one that dies leaves nothing locked. Two that admit in the same instant may
not see each other yet: a limit can be passed by one request for each further front.

The last 60 s are the present minute and the part of the one before it that still counts:

    | minute before | present |
          [......60 s......]now       used = before * (1 - share of the present minute) + present
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 60.0
FIELDS: Final = 8
_WINDOW: Final = 0
_REQUESTS: Final = 1
_TOKENS: Final = 2
_OLD_REQUESTS: Final = 3
_OLD_TOKENS: Final = 4
_RUNNING: Final = 5

Count = tuple[int, int]
"""Of the present minute, and of the one before."""


class Windows:
    """The table. `cells`: 64-bit integers, `FIELDS` for each front of each tenant; `me`: whose rows are written."""

    def __init__(self, cells: memoryview, fronts: int, me: int) -> None:
        assert cells.format == "q", "rows are of 64-bit integers"
        self.cells: Final = cells
        self._fronts = fronts
        self._me = me

    def mine(self, row: int) -> int:
        """Where the integers of this front begin for a tenant."""
        return (row * self._fronts + self._me) * FIELDS

    def used(self, row: int, now: float) -> tuple[Count, Count, int]:
        """Requests and tokens of the last two minutes, and requests that run, of all fronts."""
        cells, window = self.cells, int(now // WINDOW_S)
        requests = tokens = old_requests = old_tokens = running = 0
        start = row * self._fronts * FIELDS
        for at in range(start, start + self._fronts * FIELDS, FIELDS):
            age = window - cells[at]
            if age == 0:
                requests += cells[at + _REQUESTS]
                tokens += cells[at + _TOKENS]
                old_requests += cells[at + _OLD_REQUESTS]
                old_tokens += cells[at + _OLD_TOKENS]
            elif age == 1:
                old_requests += cells[at + _REQUESTS]
                old_tokens += cells[at + _TOKENS]
            running += cells[at + _RUNNING]
        return (requests, old_requests), (tokens, old_tokens), running

    def begin(self, row: int, tokens: int, now: float) -> int:
        """Count a request that begins, with the tokens set aside for it; the minute in which that was."""
        at = self._roll(row, now)
        self.cells[at + _REQUESTS] += 1
        self.cells[at + _TOKENS] += tokens
        self.cells[at + _RUNNING] += 1
        return self.cells[at]

    def end(self, row: int, tokens: int, window: int, now: float) -> None:
        """A request has ended: what was set aside for it in a minute is free again."""
        at = self._roll(row, now)
        self.cells[at + _RUNNING] = max(0, self.cells[at + _RUNNING] - 1)
        age = self.cells[at] - window
        if age in (0, 1):
            self.cells[at + (_TOKENS if age == 0 else _OLD_TOKENS)] -= tokens

    def spend(self, row: int, tokens: int, now: float) -> None:
        """Count tokens that were used."""
        self.cells[self._roll(row, now) + _TOKENS] += tokens

    def nothing_runs(self, row: int) -> None:
        """What ran in a front before this one has ended with it."""
        self.cells[self.mine(row) + _RUNNING] = 0

    def _roll(self, row: int, now: float) -> int:
        """Begin a new minute where it is time; where the integers are."""
        at, window = self.mine(row), int(now // WINDOW_S)
        cells = self.cells
        age = window - cells[at]
        if age:
            cells[at + _OLD_REQUESTS] = cells[at + _REQUESTS] if age == 1 else 0
            cells[at + _OLD_TOKENS] = cells[at + _TOKENS] if age == 1 else 0
            cells[at + _REQUESTS] = cells[at + _TOKENS] = 0
            cells[at] = window
        return at


def share(now: float) -> float:
    """How much of the present minute has passed, from 0 to 1."""
    return (now % WINDOW_S) / WINDOW_S


def in_use(count: Count, now: float) -> float:
    """What counts of the last 60 s."""
    return max(0.0, count[0] + count[1] * (1.0 - share(now)))


def wait_s(count: Count, limit: int, cost: int, now: float) -> float:
    """Seconds until there is room for `cost`, if nothing else comes; it must be at most `limit`."""
    assert cost <= limit, "never"
    present, before = count
    passed = share(now)
    room = limit - cost
    if present + before * (1.0 - passed) <= room:
        return 0.0
    if before > 0 and present <= room:
        return (1.0 - (room - present) / before - passed) * WINDOW_S
    rest = 1.0 - passed
    return (rest + max(0.0, 1.0 - room / present)) * WINDOW_S


def reset_s(count: Count, now: float) -> float:
    """Seconds until nothing counts any more, if nothing else comes."""
    present, before = count
    if present > 0:
        return (2.0 - share(now)) * WINDOW_S
    return (1.0 - share(now)) * WINDOW_S if before > 0 else 0.0
