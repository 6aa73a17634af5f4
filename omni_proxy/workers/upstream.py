"""A worker as the edge uses it: its connections, its protocol, the head of every request to it."""

from __future__ import annotations

import logging
import ssl
from urllib.parse import urlsplit

from msgspec import Raw

from omni_proxy.messages import Failure
from omni_proxy.workers.connectors.base import Connector, Peer
from omni_proxy.workers.http import Headers, WorkerPool

logger = logging.getLogger(__name__)


class _Discard:
    """Waits for an answer that nobody needs."""

    def on_sent(self) -> None:
        return

    def on_head(self, status: int, headers: Headers) -> None:
        return

    def on_data(self, data: bytes) -> None:
        return

    def on_end(self) -> None:
        return

    def on_failure(self, failure: Failure) -> None:
        logger.debug("releasing KV failed: %s", failure.detail)


class Upstream:
    """One worker's address, connection pool and connector."""

    def __init__(
        self,
        name: str,
        url: str,
        connector: Connector,
        *,
        api_key: str | None = None,
        bootstrap_port: int | None = None,
        idle_s: float = 4.0,
        max_idle: int = 1024,
        connect_s: float = 5.0,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.name = name
        self.url = url
        self.connector = connector
        self.replaces_authorization = api_key is not None
        self.peer = Peer(name, parts.hostname, port, bootstrap_port)
        self.pool = WorkerPool(parts.hostname, port, tls, idle_s=idle_s, max_idle=max_idle, connect_s=connect_s)
        authorization = b"authorization: Bearer %b\r\n" % api_key.encode() if api_key is not None else b""
        self._head = b" HTTP/1.1\r\nhost: %b\r\n%bcontent-type: application/json\r\n" % (
            parts.netloc.encode(),
            authorization,
        )

    def request(self, path: bytes, forward: bytes, request_id: bytes, body: bytes) -> bytes:
        """A whole request. `forward`: header lines of the client that go along."""
        if self.replaces_authorization and b"authorization:" in forward:
            lines = forward.split(b"\r\n")
            forward = b"\r\n".join([line for line in lines if not line.startswith(b"authorization:")])
        return b"POST %b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            path,
            self._head,
            forward,
            request_id,
            len(body),
            body,
        )

    def release(self, handoff: Raw) -> None:
        """Free the KV that nobody will pull, where the engine has a call for it."""
        call = self.connector.release(handoff)
        if call is not None:
            path, body = call
            self.pool.request(self.request(path.encode(), b"", b"release", body), _Discard())
