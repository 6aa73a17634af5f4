"""Where workers that go first ask for their prefill: `POST /v1/metaserver`, as vLLM-Ascend's D sends it.

A port apart from that of the clients: nobody but workers has business here. The id in the call is one that only the D
of that attempt was told. Answers come at once: D waits for its KV, not for P's answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Final, cast

import httptools
import msgspec
from msgspec import Raw, Struct

from omni_proxy.api.http_out import JSON_LINE, error_json, head
from omni_proxy.errors import ErrorCode, http_status

logger = logging.getLogger(__name__)

PATH: Final = b"/v1/metaserver"
MAX_BODY_BYTES: Final = 16 << 20
"""Block ids of a long prompt are many numbers."""
PATIENCE_S: Final = 30.0
"""How long a call may take to come, and a connection to be silent."""
_PREFIXES: Final = (b"chatcmpl-", b"cmpl-")
_OK: Final = b'{"status":"ok"}'

Asked = Callable[[Iterable[bytes], Raw], bool]


class _Call(Struct):
    request_id: str


_CALL = msgspec.json.Decoder(_Call)


def ids_of(request_id: str) -> list[bytes]:
    """The ids that an engine may have made into this one: it adds what kind of request it is, and which prompt."""
    name = request_id.encode("utf-8", "replace")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return [name, name.rpartition(b"-")[0]]


class CallbackServer:
    """The listener. `asked` says whether somebody waits for that call. Raises OSError where it cannot listen."""

    def __init__(self, asked: Asked, host: str, port: int, shown_host: str) -> None:
        self._asked = asked
        self._sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        name = f"[{shown_host}]" if ":" in shown_host else shown_host
        self.url = f"http://{name}:{self._sock.getsockname()[1]}{PATH.decode()}"
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: cast("asyncio.Protocol", _Connection(self._asked, self._open)), sock=self._sock
        )
        logger.info("workers ask for their prefills at %s", self.url)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        self._sock.close()
        for connection in list(self._open):
            connection.close()


class _Connection:
    """One connection of a worker; any number of calls, one after another."""

    def __init__(self, asked: Asked, others: set[_Connection]) -> None:
        self._asked = asked
        self._others = others
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._size = 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._others.add(self)
        self._wait()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(ErrorCode.INVALID_HEADER, "This is not an HTTP/1.1 request.")
            self._end()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Answers are a few bytes."""

    def resume_writing(self) -> None:
        return

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    # ---------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        self._url, self._body, self._size = b"", [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self._wait()
        if self._size > MAX_BODY_BYTES:
            self._refuse(ErrorCode.BODY_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        elif self._url.partition(b"?")[0] != PATH:
            self._refuse(ErrorCode.NOT_FOUND, f"There is no route but {PATH.decode()}.")
        elif self._parser.get_method() != b"POST":
            self._refuse(ErrorCode.METHOD_NOT_ALLOWED, "Only POST is allowed here.")
        else:
            self._take(b"".join(self._body))
        if not self._parser.should_keep_alive():
            self._end()

    # ------------------------------------------------------------------ internals

    def _take(self, body: bytes) -> None:
        try:
            call = _CALL.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            self._refuse(ErrorCode.INVALID_VALUE, f"The body does not name its request: {exc}.", "request_id")
            return
        if self._asked(ids_of(call.request_id), Raw(body)):
            self._answer(200, _OK)
        else:
            logger.warning("a worker asks for the prefill of %r, which is not waited for", call.request_id[:200])
            self._refuse(ErrorCode.NOT_FOUND, f"No request {call.request_id[:200]!r} waits for this.", "request_id")

    def _refuse(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        self._answer(http_status(code), error_json(code, message, param))

    def _answer(self, status: int, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            framing = b"content-length: %d\r\n" % len(body)
            self._transport.write(head(status, JSON_LINE, b"-", framing, close=False) + body)

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._end)

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.close()
