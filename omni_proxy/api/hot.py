"""A hot request while it is read, and what becomes of its head: forwarded headers, request id, the core's description.

Knows no sockets; the protocol that reads and answers is `front`.
"""

from __future__ import annotations

import hashlib
from typing import Final

from omni_proxy.access.gate import CREDENTIALS
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.http_out import HOP_BY_HOP
from omni_proxy.call import GENERATING, Call, check_form, parse_call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.messages import RequestSpec

_STAYS_HERE: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-type",
    b"accept-encoding",
    b"expect",
    b"x-request-id",
    b"x-forwarded-for",
    b"x-data-parallel-rank",
    b"x-data-parallel-host-port",
    b"x-prefiller-host-port",
    b"x-prefiller-url",
    b"x-encoder-hosts-ports",
    b"content_length",
    b"transfer_encoding",
}
"""Headers that are ours to set, or about this connection only; all others go on to the workers."""
_KEYED_STAYS_HERE: Final = _STAYS_HERE | CREDENTIALS

_USUAL_CONNECTION: Final[tuple[list[bytes], ...]] = ([], [b"keep-alive"], [b"close"], [b"Keep-Alive"], [b"Close"])
MAX_REQUEST_ID: Final = 128
BYTES_PER_TOKEN: Final = 4
"""For estimates of a prompt's length where nobody tokenises it."""


class _NoEvent:
    """Stands for the event on which uvicorn wakes an ASGI task; a hot request has none."""

    def set(self) -> None:
        return


_SESSION = b"x-session-id: "
_TENANT: Final = b"x-tenant-id: "
_TTFT_TARGET: Final = b"x-ttft-target-s: "
_AUTHORIZATION: Final = b"authorization: "


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
        self.message_event = _NoEvent()


def forwarded(headers: list[tuple[bytes, bytes]], peer: str, keyed: bool = False) -> tuple[bytes, bytes]:
    """Header lines for the workers, and the user agent for the access log. `keyed`: the client's key was for us."""
    options = [value for name, value in headers if name == b"connection"]
    if options not in _USUAL_CONNECTION:
        listed = {token.strip().lower() for value in options for token in value.split(b",")}
        headers = [header for header in headers if header[0] not in listed]
    stays = _KEYED_STAYS_HERE if keyed else _STAYS_HERE
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in stays]
    sources = [value for name, value in headers if name == b"x-forwarded-for"]
    lines.append(b"x-forwarded-for: %b\r\n" % b", ".join([*sources, peer.encode()]))
    return b"".join(lines), next((value for name, value in headers if name == b"user-agent"), b"")


def clean_id(value: bytes) -> bytes:
    """A client's request id if it can stand in a header and a log line, else nothing."""
    usable = 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.decode().isprintable() and b" " not in value
    return value if usable else b""


def session_of(forward: bytes) -> str:
    """The client's `x-session-id` among the header lines for the workers; empty for none, or one too long."""
    return _header(forward, _SESSION)


def tenant_of(forward: bytes) -> str:
    """Who asks: the client's `x-tenant-id`, else a digest of its API key; empty where there is neither."""
    tenant = _header(forward, _TENANT)
    if tenant:
        return tenant
    start = forward.find(_AUTHORIZATION)
    if start < 0:
        return ""
    key = forward[start + len(_AUTHORIZATION) : forward.index(b"\r\n", start)]
    return "key-" + hashlib.blake2b(key, digest_size=6).hexdigest()


def ttft_target_of(forward: bytes) -> float | None:
    """The client's `x-ttft-target-s`, in seconds; None for none, or for what is no positive number."""
    text = _header(forward, _TTFT_TARGET)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e6 else None


def _header(forward: bytes, name: bytes) -> str:
    """The value of a header line; `name` ends with its colon and space."""
    start = forward.find(name)
    if start < 0 or (start and forward[start - 2 : start] != b"\r\n"):
        return ""
    value = forward[start + len(name) : forward.index(b"\r\n", start)]
    return value.decode("latin-1") if len(value) <= MAX_REQUEST_ID else ""


def read_call(hot: HotRequest, body: bytes) -> Call:
    """What a client asks. Raises Rejected."""
    call = parse_call(hot.path.decode(), body)
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
        session=session_of(exchange.forward),
        tenant=exchange.tenant or tenant_of(exchange.forward),
        ttft_target_s=ttft_target_of(exchange.forward) or call.ttft_target_s,
        encode_s=exchange.encode_s,
    )
