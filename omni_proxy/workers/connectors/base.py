"""What every connector answers: which body goes to P, what P's answer means, which body goes to D.

A connector turns bytes into bytes and keeps no state; sockets, leases and retries are others' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Protocol

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.token_reports import TokenReports


class Order(Enum):
    """Who is asked first where both workers of a request are chosen together (parallel mode)."""

    TOGETHER = auto()
    PREFILL_FIRST = auto()
    """D is asked when P has answered, but P has to be told of D."""
    DECODE_FIRST = auto()
    """D is asked, and asks for its prefill by a call to the gateway."""


class Connector(Protocol):
    """One engine's handoff protocol."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> tuple[Mode, ...]: ...

    @property
    def order(self) -> Order:
        """In parallel mode."""
        ...

    @property
    def handoff_reusable(self) -> bool:
        """May another D be tried with the same parameters after one that was never reached?"""
        ...

    @property
    def ids_fields(self) -> Mapping[str, str]:
        """By endpoint: the field in which the engine takes the prompt as token ids instead of text."""
        ...

    @property
    def token_reports(self) -> TokenReports | None:
        """How the engine tells the token ids of a stream; None: it does not, and no stream of it can be continued."""
        ...

    @property
    def controls(self) -> Mapping[str, str]:
        """The engine's own routes for operators' calls (`workers.control`), where they are not vLLM's."""
        ...

    @property
    def kv_by_id(self) -> bool:
        """Is the request's id what D finds its KV by? Then it has to be ours, and engines give responses their own."""
        ...

    @property
    def kv_lease_s(self) -> float | None:
        """How long P usually keeps KV that nobody pulls; None: it does not, or that is not known."""
        ...

    @property
    def releases_kv(self) -> bool:
        """Has `release` a call for every handoff?"""
        ...

    @property
    def aborts_by_call(self) -> bool:
        """Has `abort` a call for every leg?"""
        ...

    def request_id(self, pair: Pair) -> bytes:
        """The `x-request-id` of both legs."""
        ...

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        """The body of the P leg. `asked`: what D said when it asked for its prefill, where D goes first."""
        ...

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        """What a 200 answer of P means. Raises GarbageAnswer."""
        ...

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        """The fields to add to the client's body for D."""
        ...

    def release(self, handoff: bytes) -> tuple[str, bytes] | None:
        """Path and body of the call that frees P's blocks when D will not come, where the engine has one."""
        ...

    def abort(self, request_id: bytes) -> tuple[str, bytes] | None:
        """Path and body of the call that ends a leg, where an engine does not end it when its connection is closed."""
        ...


class Usual:
    """What most protocols have in common."""

    order: Order = Order.TOGETHER
    handoff_reusable: bool = False
    ids_fields: Mapping[str, str] = {}
    controls: Mapping[str, str] = {}
    token_reports: TokenReports | None = None
    kv_by_id: bool = False
    kv_lease_s: float | None = None
    releases_kv: bool = False
    aborts_by_call: bool = False

    def request_id(self, pair: Pair) -> bytes:
        return pair.request_id

    def release(self, handoff: bytes) -> tuple[str, bytes] | None:
        return None

    def abort(self, request_id: bytes) -> tuple[str, bytes] | None:
        return None
