"""One client request at the edge: what was asked, and what has been answered so far.

It owns the client's half of the conversation. Legs hand it bytes, the core tells it how it ended; whether the client
sees a status or a broken stream depends only on whether a head has been written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from omni_proxy.access.gate import Grant
from omni_proxy.api.http_out import JSON_LINE, error_event, error_json, head, named_error, named_error_event
from omni_proxy.call import MESSAGES, RESPONSES, Call
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.lifecycle.enums import COMPLETED
from omni_proxy.messages import Close, RequestSpec

if TYPE_CHECKING:
    from omni_proxy.api.encoding import Encoding
    from omni_proxy.api.family import Family
    from omni_proxy.api.foresight import Kept
    from omni_proxy.api.legs import Leg
    from omni_proxy.api.resumption import Resumption
    from omni_proxy.api.said import Said
    from omni_proxy.api.timing import Timing
    from omni_proxy.api.trace_context import TraceContext
    from omni_proxy.relay.pump import Passage


_ANTHROPIC: Final = MESSAGES.encode()
_NAMED: Final = (RESPONSES, MESSAGES)
"""Their streams are of named events."""


class ClientSide(Protocol):
    """The client's connection as an exchange uses it."""

    passage: Passage | None

    @property
    def peer(self) -> str: ...

    def write(self, data: bytes) -> None: ...

    def bare_fd(self) -> int:
        """The socket, where another may write to it now; -1 where not."""

    def finished(self, close: bool) -> None:
        """The response is whole; `close` ends the connection too."""
        ...

    def abort(self) -> None:
        """End the connection so that the client sees an incomplete response."""
        ...

    def drop(self) -> None:
        """End the connection at once, also when the client does not read."""
        ...

    def has_left(self) -> bool:
        """Did the client hang up while nobody reads from it?"""
        ...


class Answer:
    """A worker's whole answer that was not a success: what the client may have to see."""

    __slots__ = ("body", "lines", "status")

    def __init__(self, status: int, lines: bytes, body: bytes) -> None:
        self.status = status
        self.lines = lines
        """Its header lines."""
        self.body = body


class Exchange:
    """The edge's state of one request."""

    __slots__ = (
        "answers",
        "ask_id",
        "bytes_out",
        "call",
        "chunked",
        "client",
        "complete",
        "encode_s",
        "encoded",
        "encoding",
        "error_told",
        "family",
        "forward",
        "grant",
        "handoff",
        "handoff_from",
        "kept",
        "kept_alive",
        "legs",
        "mid_event",
        "more_headers",
        "path",
        "peer",
        "prefill_cached",
        "prefill_pending",
        "renames",
        "request_id",
        "resumption",
        "rid",
        "room",
        "said",
        "slow_since",
        "spec",
        "status",
        "tenant",
        "timing",
        "tokenizing_since",
        "trace",
        "user_agent",
        "worker_id",
    )

    worker_id: bytes
    """By which workers know it."""
    tenant: str
    """Whose key was shown; empty where nobody asks for keys."""
    grant: Grant | None
    """What is set aside of the tenant's limits for as long as it runs."""
    more_headers: bytes
    """Header lines of ours for the answer."""
    client: ClientSide | None
    chunked: bool
    """May the response be chunked? Not for HTTP/1.0."""
    call: Call | None
    forward: bytes
    """The client's headers that go to workers, as header lines."""
    said: Said | None
    """What its headers say."""
    spec: RequestSpec | None
    """What the core was told of this request."""
    complete: bool
    """The whole answer has been written."""
    encoding: Encoding | None
    """Its images and sound on their way to encode workers."""
    encode_s: float | None
    """How long that took; None where nothing was encoded."""
    encoded: bytes
    """Where encode workers left their results, as JSON for the worker that computes the prompt."""
    family: Family | None
    """Those that serve it in parts; None: it is served as one."""
    renames: tuple[bytes, ...]
    """What the worker calls the model and what the client does, in pairs, where these are not the same."""
    ask_id: bytes
    """The id by which D may ask for its prefill; empty where it does not."""
    legs: dict[int, Leg]
    """Running legs by attempt."""
    answers: dict[int, Answer]
    """Error answers of workers by attempt, kept until it is known which one the client sees."""
    handoff: bytes | None
    handoff_from: str | None
    prefill_cached: int | None
    prefill_pending: bool
    """P works beside D and has not answered: what D says must not be believed yet."""
    status: int
    """What the client was told; 0: nothing yet."""
    error_told: bool
    """The worker has put an error event into the stream itself."""
    mid_event: bool
    """What the client has of the stream ends within an event."""
    slow_since: float | None
    resumption: Resumption | None
    """What another pair would need to go on with the stream; None: nobody will."""
    kept: Kept | None
    """What the client was sent, where the next turn is foreseen from it."""
    tokenizing_since: float | None
    timing: Timing | None
    """Where the time goes, for a client that asks for it."""
    trace: TraceContext | None
    """Its place in a trace; None: nobody wants to see it there."""

    def __init__(self, rid: str, request_id: bytes, client: ClientSide, kept_alive: bool, chunked: bool) -> None:
        self.rid = rid
        self.request_id = request_id
        self.worker_id = request_id
        self.tenant = ""
        self.grant = None
        self.more_headers = b""
        self.client = client
        self.kept_alive = kept_alive
        self.chunked = chunked
        self.call = None
        self.forward = b""
        self.said = None
        self.spec = None
        self.complete = False
        self.path = b""
        self.peer = client.peer
        self.user_agent = b""
        self.encoding = None
        self.encode_s = None
        self.encoded = b""
        self.family = None
        self.renames = ()
        self.room = 0
        self.ask_id = b""
        self.legs = {}
        self.answers = {}
        self.handoff = None
        self.handoff_from = None
        self.prefill_cached = None
        self.prefill_pending = False
        self.status = 0
        self.bytes_out = 0
        self.error_told = False
        self.mid_event = False
        self.slow_since = None
        self.resumption = None
        self.kept = None
        self.tokenizing_since = None
        self.timing = None
        self.trace = None

    @property
    def leg_call(self) -> Call | None:
        """What workers are asked: the client's call, or one for the rest of its answer."""
        resumption = self.resumption
        return self.call if resumption is None or resumption.call is None else resumption.call

    # ----------------------------------------------------------------- writing

    @property
    def committed(self) -> bool:
        """Has the client seen a status?"""
        return self.status != 0

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a whole response. `lines`: header lines."""
        if self.client is None:
            return
        self.status = status
        if self.kept is not None and status == 200:
            self.kept.add(body)
        if self.renames and status == 200:
            body = renamed(body, self.renames)
        self.bytes_out = len(body)
        if self.timing is not None:
            lines += self.timing.line()
        framing = b"content-length: %d\r\n" % len(body)
        head_of = head(status, lines, self.request_id, framing, not self.kept_alive, self.more_headers)
        self.client.write(head_of + body)

    def respond_error(self, code: ErrorCode, message: str, param: str | None, retry_after_s: float | None) -> None:
        """Send an error of our own in the OpenAI shape."""
        lines = JSON_LINE
        if retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % max(1, round(retry_after_s))
        body = named_error(code, message, param) if self.path == _ANTHROPIC else error_json(code, message, param)
        self.respond(http_status(code), lines, body)

    def open_stream(self, status: int, lines: bytes) -> None:
        """Send the head of a response whose length is not known."""
        if self.client is None:
            return
        self.status = status
        if not self.chunked:
            self.kept_alive = False
        if self.timing is not None:
            lines += self.timing.line()
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        self.client.write(head(status, lines, self.request_id, framing, not self.kept_alive, self.more_headers))

    def send(self, data: bytes, framed: bytes = b"") -> None:
        """Send a part of the stream. `framed`: the same data as a whole chunk, where it came as one."""
        client = self.client
        if client is None or not data:
            return
        if self.kept is not None:
            self.kept.add(data)
        if self.renames:
            data, framed = renamed(data, self.renames), b""
        self.bytes_out += len(data)
        if not self.chunked:
            client.write(data)
        else:
            client.write(framed or b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """Send the end of the stream."""
        self.complete = True
        if self.client is not None and self.chunked:
            self.client.write(b"0\r\n\r\n")

    # ------------------------------------------------------------------ the end

    def close(self, close: Close) -> None:
        """Tell the client how its request ended, unless it knows already or has left."""
        client = self.client
        if client is None:
            return
        if close.outcome is COMPLETED or self.complete:
            client.finished(close=not self.kept_alive)
        elif not self.committed:
            self._refuse(close)
            client.finished(close=not self.kept_alive)
        else:
            self._break_off(close, client)
        self.client = None

    def _refuse(self, close: Close) -> None:
        answer = self.answers.get(close.failed.attempt) if close.failed is not None else None
        if answer is not None:
            self.respond(answer.status, answer.lines, answer.body)
            return
        # "Client gone" with a client still there: a fault of ours ended the request.
        code = ErrorCode.INTERNAL if close.error in (None, ErrorCode.CLIENT_GONE) else close.error
        param = _param_of(code, self.call) if self.call is not None else None
        self.respond_error(code, close.detail, param, close.retry_after_s)

    def _break_off(self, close: Close, client: ClientSide) -> None:
        """A stream that broke never ends cleanly: an error event where the format has one, then no last chunk."""
        if self.call is not None and self.call.stream and not self.error_told:
            event_of = named_error_event if self.call.path in _NAMED else error_event
            event = event_of(close.error or ErrorCode.INTERNAL, close.detail)
            self.send(b"\n\n" + event if self.mid_event else event)
        client.abort()


def renames(theirs: str, asked: str) -> tuple[bytes, ...]:
    """The field `model` as a worker writes it and as the client knows it, for each way of writing; none where equal."""
    if not asked or theirs == asked:
        return ()
    old, new = msgspec.json.encode(theirs), msgspec.json.encode(asked)
    pairs: list[bytes] = []
    for key in (b'"model":', b'"model": '):
        pairs += [key + old, key + new]
    return tuple(pairs)


def renamed_id(theirs: bytes, asked: bytes) -> tuple[bytes, ...]:
    """A request id made for the workers, and the client's own; none where equal. Nobody can guess the first."""
    if theirs == asked:
        return ()
    return msgspec.json.encode(theirs.decode())[1:-1], msgspec.json.encode(asked.decode())[1:-1]


def renamed(data: bytes, pairs: tuple[bytes, ...]) -> bytes:
    """Whole events, or a whole answer, with the client's name of the model.

    Inside JSON text quotes are escaped: no text that a model writes can look like the field.
    """
    for at in range(0, len(pairs), 2):
        data = data.replace(pairs[at], pairs[at + 1])
    return data


def _param_of(code: ErrorCode, call: Call) -> str | None:
    """The field of the body to which the core's refusal is owed."""
    match code:
        case ErrorCode.MODEL_NOT_FOUND:
            return "model"
        case ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            return "messages" if "messages" in call.fields else "prompt"
        case ErrorCode.INVALID_VALUE:
            return call.whole_because
        case _:
            return None
