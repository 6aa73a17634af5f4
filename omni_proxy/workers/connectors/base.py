"""What every connector answers: which body goes to P, what P's answer means, which body goes to D.

A connector turns bytes into bytes and keeps no state; sockets, leases and retries are others' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from omni_proxy.call import Call
from omni_proxy.messages import Mode, Usage
from omni_proxy.workers.connectors.token_reports import TokenReports


class Order(Enum):
    """Who is asked first where both workers of a request are chosen together (parallel mode)."""

    TOGETHER = auto()
    PREFILL_FIRST = auto()
    """D is asked when P has answered, but P has to be told of D."""
    DECODE_FIRST = auto()
    """D is asked, and asks for its prefill by a call to the gateway."""


class Peer(Struct, frozen=True):
    """A worker of a request, as far as a body has to name it."""

    name: str
    host: str
    port: int
    bootstrap_port: int | None = None
    rank: int | None = None
    """Of the data-parallel rank that is meant; None where the endpoint is one engine."""
    dp_size: int = 1
    """Data-parallel ranks behind the endpoint."""
    kv_address: str = ""
    """HOST:PORT at which its KV connector listens, where bodies or ids have to name that."""
    engine_id: str = ""
    """By which its KV connector calls itself, where others have to know that."""


class Pair(Struct, frozen=True):
    """One attempt of a request: the workers that are known by now, and what they share."""

    request_id: bytes
    """The client's, or ours; not unique."""
    room: int
    """A random number of 63 bits that both legs of an attempt share."""
    prefill: Peer | None = None
    """None: D does both."""
    decode: Peer | None = None
    """None: not chosen yet."""
    together: bool = False
    """Both were chosen together (parallel mode)."""
    callback_url: str = ""
    """Where D may ask for its prefill."""

    @property
    def unique_id(self) -> bytes:
        """A request id that no other attempt has and no client can know: for protocols in which it is a key to KV."""
        return b"%b-%016x" % (self.request_id, self.room)


class PrefillAnswer(Struct, frozen=True):
    """What P's answer leaves for D. `handoff` None: P gave nothing that D could use."""

    handoff: Raw | None
    usage: Usage


class GarbageAnswer(Exception):
    """A worker's answer is not what its protocol promises."""


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

    def decode_fields(self, call: Call, pair: Pair, handoff: Raw | None) -> list[tuple[str, bytes]]:
        """The fields to add to the client's body for D."""
        ...

    def release(self, handoff: Raw) -> tuple[str, bytes] | None:
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

    def release(self, handoff: Raw) -> tuple[str, bytes] | None:
        return None

    def abort(self, request_id: bytes) -> tuple[str, bytes] | None:
        return None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    """In the words of chat and completions, and of responses and messages."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Answer(Struct):
    usage: _Usage | None = None
    kv_transfer_params: Raw = Raw(b"null")


_ANSWER = msgspec.json.Decoder(_Answer)


def read_usage_and_params(body: bytes) -> tuple[Usage, Raw]:
    """Usage and `kv_transfer_params` (raw; `null` when there are none) of P's answer. Raises GarbageAnswer."""
    try:
        answer = _ANSWER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise GarbageAnswer(f"not the JSON of an answer ({exc})") from exc
    usage = answer.usage
    if usage is None:
        return Usage(), answer.kv_transfer_params
    details = usage.prompt_tokens_details or usage.input_tokens_details
    # Absent details mean that nothing was cached; P's one token is not part of the answer.
    cached = (details.cached_tokens if details is not None else usage.cache_read_input_tokens) or 0
    prompt_tokens = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    return Usage(prompt_tokens, None, cached), answer.kv_transfer_params
