"""The gate: whose key a request shows, and whether its tenant has room for it now.

One for each front; what is counted is shared (`windows`). Knows no connections: those tell when a request ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hmac import compare_digest
from typing import Final

from omni_proxy.access.keys import digest
from omni_proxy.access.shared import Counts
from omni_proxy.access.windows import FIELDS, Count, Windows, in_use, reset_s, wait_s
from omni_proxy.errors import ErrorCode, Rejected

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"x-tenant-id"})
"""Headers that stay here when the gateway asks for keys: workers have no use for them, and nobody names his tenant."""

Headers = Iterable[tuple[bytes, bytes]]


class Allowance:
    """What one tenant may do; None: no limit."""

    __slots__ = ("concurrent", "requests_per_minute", "row", "tenant", "tokens_per_minute")

    def __init__(
        self,
        tenant: str,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrent: int | None = None,
    ) -> None:
        self.tenant = tenant
        self.requests_per_minute = requests_per_minute
        self.tokens_per_minute = tokens_per_minute
        self.concurrent = concurrent
        self.row = 0

    @property
    def limited(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None)


class Grant:
    """A request that was let in: what was set aside for it, and when."""

    __slots__ = ("tenant", "tokens", "window")

    def __init__(self, tenant: str, tokens: int, window: int) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.window = window


class Gate:
    """Keys and limits of one front. Without any key it stands open."""

    def __init__(self, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        self.on = False
        """Are keys asked for?"""
        self._counts = counts
        self._clock = clock
        self._keys: dict[bytes, tuple[bytes, Allowance]] = {}
        self._tenants: dict[str, Allowance] = {}
        self._rows: Sequence[str] = ()
        self._windows: Windows | None = None

    def use(self, on: bool, tenants: Mapping[str, tuple[Allowance, Sequence[bytes]]]) -> None:
        """Use these tenants and digests of keys from now on; what was counted of them still counts."""
        rows = sorted(tenants)
        before, old = self._windows, self._tenants
        if before is None or rows != list(self._rows):
            self._windows = windows = self._counts.open(rows)
            for row, name in enumerate(rows):
                if before is not None and name in old:
                    there, here = before.mine(old[name].row), windows.mine(row)
                    windows.cells[here : here + FIELDS] = before.cells[there : there + FIELDS]
                else:
                    windows.nothing_runs(row)
        for row, name in enumerate(rows):
            tenants[name][0].row = row
        self.on, self._rows = on, rows
        self._tenants = {name: allowance for name, (allowance, _) in tenants.items()}
        self._keys = {key[:8]: (key, allowance) for allowance, keys in tenants.values() for key in keys}

    def who(self, headers: Headers) -> str:
        """The tenant whose key is shown. Raises Rejected."""
        key = shown_key(headers)
        if not key:
            message = "You didn't provide an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key'."
            raise Rejected(ErrorCode.INVALID_API_KEY, message)
        found = digest(key)
        # The digest of a key tells nothing of it, so its first bytes may be looked up; the rest takes the same time.
        known, allowance = self._keys.get(found[:8], (b"", None))
        if allowance is None or not compare_digest(found, known):
            raise Rejected(ErrorCode.INVALID_API_KEY, "The API key is not known here.")
        return allowance.tenant

    def admit(self, tenant: str, tokens: int) -> tuple[Grant | None, bytes]:
        """Let a request in with tokens set aside for it, and header lines that tell what is left.

        None: the tenant has no limits. Raises Rejected with the seconds after which to try again, and with the lines
        in `headers`.
        """
        allowance, windows = self._tenants.get(tenant), self._windows
        if allowance is None or windows is None or not allowance.limited:
            return None, b""
        now = self._clock()
        requests, spent, running = windows.used(allowance.row, now)
        refusal = _refusal(allowance, tokens, requests, spent, running, now)
        if refusal is not None:
            refusal.headers = _told(allowance, requests, spent, running, now)
            raise refusal
        window = windows.begin(allowance.row, tokens, now)
        lines = _told(allowance, (requests[0] + 1, requests[1]), (spent[0] + tokens, spent[1]), running + 1, now)
        return Grant(tenant, tokens, window), lines

    def ended(self, grant: Grant) -> None:
        """A request that was let in has ended; what it used is told by `spent`."""
        allowance, windows = self._tenants.get(grant.tenant), self._windows
        if allowance is not None and windows is not None:
            windows.end(allowance.row, grant.tokens, grant.window, self._clock())

    def spent(self, tenant: str, tokens: int) -> None:
        """A tenant's request used tokens, those of its prompt and of its answer."""
        allowance, windows = self._tenants.get(tenant), self._windows
        if allowance is not None and windows is not None and allowance.tokens_per_minute is not None:
            windows.spend(allowance.row, tokens, self._clock())


def shown_key(headers: Headers) -> bytes:
    """The key in a request's head; empty where there is none, or where it shows several."""
    found = [_bearer(value) if name == b"authorization" else value for name, value in headers if name in _SHOWN]
    return found[0] if len(found) == 1 else b""


_SHOWN: Final = frozenset({b"authorization", b"x-api-key"})


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _refusal(
    allowance: Allowance, tokens: int, requests: Count, spent: Count, running: int, now: float
) -> Rejected | None:
    most = allowance.concurrent
    if most is not None and running >= most:
        return _limited(allowance, f"{most} requests at once", 1.0)
    most = allowance.requests_per_minute
    if most is not None and (wait := wait_s(requests, most, 1, now)) > 0:
        return _limited(allowance, f"{most} requests a minute", wait)
    most = allowance.tokens_per_minute
    if most is None:
        return None
    if tokens > most:
        message = f"This request may use {tokens} tokens: more than the {most} a minute of '{allowance.tenant}'."
        return Rejected(ErrorCode.RATE_LIMITED, message)
    wait = wait_s(spent, most, tokens, now)
    return _limited(allowance, f"{most} tokens a minute", wait) if wait > 0 else None


def _limited(allowance: Allowance, limit: str, wait: float) -> Rejected:
    message = f"Rate limit reached for '{allowance.tenant}': {limit}. Please try again in {lasting(wait)}."
    return Rejected(ErrorCode.RATE_LIMITED, message, retry_after_s=math.ceil(wait))


def _told(allowance: Allowance, requests: Count, spent: Count, running: int, now: float) -> bytes:
    """The header lines of OpenAI's API, and two like them for requests at once."""
    lines = b""
    for kind, limit, count in (
        (b"requests", allowance.requests_per_minute, requests),
        (b"tokens", allowance.tokens_per_minute, spent),
    ):
        if limit is not None:
            left = max(0, math.floor(limit - in_use(count, now)))
            lines += b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
                kind, limit, kind, left, kind, lasting(reset_s(count, now)).encode(),
            )  # fmt: skip
    if allowance.concurrent is not None:
        lines += b"x-ratelimit-limit-concurrent: %d\r\nx-ratelimit-remaining-concurrent: %d\r\n" % (
            allowance.concurrent,
            max(0, allowance.concurrent - running),
        )
    return lines


def lasting(seconds: float) -> str:
    """A time as OpenAI writes it: `120ms`, `8.5s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s"
