"""A hot request while it is read, and what the core is told of it.

Knows no sockets; the protocol that reads and answers is `front`.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.access.gate import Gate
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.guard import Guard
from omni_proxy.api.said import MAX_REQUEST_ID
from omni_proxy.api.whole import WholeRequest
from omni_proxy.call import GENERATING, HOT_PATHS, Call, check_form, parse_call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.messages import RequestSpec

_PATHS: Final = {path.encode(): path for path in HOT_PATHS}
BYTES_PER_TOKEN: Final = 4
"""For estimates of a prompt's length where nobody tokenises it."""


class _NoEvent:
    """Stands for the event on which uvicorn wakes an ASGI task; a hot request has none."""

    def set(self) -> None:
        return


_NO_EVENT: Final = _NoEvent()


class HotRequest:
    """A hot request while it is read and answered. Stands where uvicorn keeps its cycle."""

    __slots__ = (
        "body",
        "disconnected",
        "exchange",
        "expects",
        "headers",
        "keep_alive",
        "message_event",
        "path",
        "queued",
        "read",
        "refusal",
        "refused",
        "response_complete",
        "size",
    )

    def __init__(self, exchange: Exchange, path: bytes, headers: list[tuple[bytes, bytes]], keep_alive: bool) -> None:
        self.exchange = exchange
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.body: list[bytes] = []
        self.size = 0
        self.expects = False
        """The client waits for a 100 before it sends the body."""
        self.read = False
        self.queued = False
        """Another request on this connection is being answered (pipelining)."""
        self.refused = False
        self.refusal: Rejected | None = None
        """Why, where it is not the size of its body."""
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NO_EVENT


def whole_request(exchange: Exchange, whole: WholeRequest) -> HotRequest:
    """A request that was read whole."""
    hot = HotRequest(exchange, whole.head.path, whole.head.headers, True)
    hot.body.append(whole.body)
    hot.size = len(whole.body)
    hot.read = True
    return hot


def let_in(hot: HotRequest, gate: Gate, guard: Guard) -> None:
    """Before the body is read: is the route served, and whose key is shown? Raises Rejected."""
    exchange = hot.exchange
    exchange.path = hot.path
    path = _PATHS[hot.path]
    if not (guard.serves_all or guard.serves(path)):
        raise Rejected(ErrorCode.NOT_FOUND, f"There is no route {path}.")
    if gate.on:
        exchange.tenant = gate.who(hot.headers)
        if exchange.request_id != exchange.rid.encode():
            # Tenants must not be able to ask for the ids of one another's requests.
            exchange.worker_id = b"%b-%b" % (exchange.request_id, exchange.rid.encode())


def let_go(hot: HotRequest, gate: Gate) -> None:
    """A request's answer has ended: what was set aside for it is its tenant's again."""
    hot.response_complete = True
    grant, hot.exchange.grant = hot.exchange.grant, None
    if grant is not None:
        gate.ended(grant)


def clean_id(value: bytes) -> bytes:
    """A client's request id if it can stand in a header and a log line, else nothing."""
    usable = 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.decode().isprintable() and b" " not in value
    return value if usable else b""


def read_call(hot: HotRequest, body: bytes) -> Call:
    """What a client asks. Raises Rejected."""
    call = parse_call(_PATHS[hot.path], body)
    if call.form:
        call.content_type = next((value for name, value in hot.headers if name == b"content-type"), b"")
        if not call.content_type.startswith(b"multipart/form-data"):
            raise Rejected(ErrorCode.INVALID_VALUE, f"{call.path} takes a multipart/form-data body.")
        check_form(body, call.content_type)
    return call


def tokens_of(call: Call, size: int) -> int:
    """What a request may use: an estimate of its prompt, and the most that it allows for each of its answers."""
    prompt = max(1, (size if call.prompt_bytes is None else call.prompt_bytes) // BYTES_PER_TOKEN)
    answers = 0 if call.max_tokens is None else call.max_tokens * max(1, call.samples) * max(1, call.prompts)
    return prompt + answers


def request_spec(exchange: Exchange, call: Call, size: int, counts_tokens: bool) -> RequestSpec:
    """What the core is told of a request. `size`: of its body, in bytes."""
    said = exchange.said
    return RequestSpec(
        model=call.model,
        endpoint=call.path,
        prompt_tokens=max(1, (size if call.prompt_bytes is None else call.prompt_bytes) // BYTES_PER_TOKEN),
        max_tokens=call.max_tokens,
        stream=call.stream,
        priority=call.priority,
        tokenize=counts_tokens and call.path in GENERATING,
        whole=call.whole,
        thinking=call.thinking,
        external_id=exchange.request_id.decode(),
        session="" if said is None else said.session,
        tenant=exchange.tenant or ("" if said is None else said.tenant),
        ttft_target_s=(None if said is None else said.ttft_target_s) or call.ttft_target_s,
        encode_s=exchange.encode_s,
    )
