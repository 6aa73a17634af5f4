"""A worker as the edge uses it: its connections, its protocol, the head of every request to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from omni_proxy.messages import Failure
from omni_proxy.tls import ClientTls, TlsError
from omni_proxy.workers.answer import Head
from omni_proxy.workers.connectors.base import Connector, Usual
from omni_proxy.workers.connectors.pair import Peer
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.http import WorkerPool
from omni_proxy.workers.member import Member

logger = logging.getLogger(__name__)


class _Discard:
    """Waits for an answer that nobody needs."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_sent(self) -> None:
        return

    def on_head(self, head: Head) -> None:
        return

    def on_data(self, data: bytes) -> None:
        return

    def on_end(self) -> None:
        return

    def on_failure(self, failure: Failure) -> None:
        logger.debug("%s failed: %s", self._path, failure.detail)


class Upstream:
    """One worker's address, connection pool and connector. Raises TlsError."""

    def __init__(self, member: Member, idle_s: float, max_idle: int, connect_s: float) -> None:
        parts = urlsplit(member.url)
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        tls = ClientTls(member.tls) if member.tls is not None else None
        self.member = member
        self.connector: Connector = CONNECTORS[member.connector]
        self.names_requests = getattr(type(self.connector), "request_id", None) is not Usual.request_id
        """Has its protocol request ids of its own?"""
        self.aborts_by_call = self.connector.aborts_by_call
        self.model_names: dict[str, str] = dict(member.model_names)
        self.replaces_authorization = member.api_key is not None
        self.peer = Peer(
            member.name,
            parts.hostname,
            port,
            member.bootstrap_port,
            member.rank,
            member.dp_size,
            member.kv_address,
            member.engine_id,
        )
        self.pool = WorkerPool(parts.hostname, port, tls, idle_s=idle_s, max_idle=max_idle, connect_s=connect_s)
        key = member.api_key
        authorization = b"authorization: Bearer %b\r\n" % key.encode() if key is not None else b""
        rank = b"" if member.rank is None else b"x-data-parallel-rank: %d\r\n" % member.rank
        self._plain_head = b" HTTP/1.1\r\nhost: %b\r\n%b%b" % (parts.netloc.encode(), authorization, rank)
        self._head = self._plain_head + b"content-type: application/json\r\n"

    def name_of(self, model: str) -> str:
        """What this worker calls a model."""
        return self.model_names.get(model, model)

    def describe(self, member: Member) -> None:
        """Take over what a member serves; where it is and how to talk to it have not changed."""
        self.member = member
        self.model_names = dict(member.model_names)

    def request(self, path: bytes, forward: bytes, request_id: bytes, body: bytes, content_type: bytes = b"") -> bytes:
        """A whole request. `forward`: header lines of the client that go along; `content_type`: where not JSON."""
        if self.replaces_authorization and b"authorization:" in forward:
            lines = forward.split(b"\r\n")
            forward = b"\r\n".join([line for line in lines if not line.startswith(b"authorization:")])
        return b"POST %b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            path,
            self._plain_head + b"content-type: %b\r\n" % content_type if content_type else self._head,
            forward,
            request_id,
            len(body),
            body,
        )

    def release(self, handoff: bytes) -> None:
        """Free the KV that nobody will pull, where the engine has a call for it."""
        self._tell(self.connector.release(handoff), b"release")

    def abort(self, request_id: bytes) -> None:
        """End the leg that has this id, where the engine has a call for it."""
        self._tell(self.connector.abort(request_id), request_id)

    def _tell(self, call: tuple[str, bytes] | None, request_id: bytes) -> None:
        if call is not None:
            path, body = call
            self.pool.request(self.request(path.encode(), b"", request_id, body), _Discard(path))


class Upstreams(Mapping[str, Upstream]):
    """The upstreams by name. Seconds and counts as in the config's `keepalive` and `timeouts`."""

    def __init__(self, idle_s: float = 4.0, max_idle: int = 1024, connect_s: float = 5.0) -> None:
        self._settings = (idle_s, max_idle, connect_s)
        self._upstreams: dict[str, Upstream] = {}

    def configure(self, idle_s: float, max_idle: int, connect_s: float) -> None:
        """Use other settings for the connections from now on."""
        self._settings = (idle_s, max_idle, connect_s)
        for upstream in self._upstreams.values():
            upstream.pool.configure(*self._settings)

    def set(self, members: Iterable[Member]) -> None:
        """Take over all members; the connections of those that have not changed stay.

        A member whose certificates cannot be loaded is left out: its legs fail as those of one that is unreachable.
        """
        wanted = {member.name: member for member in members}
        for name, upstream in list(self._upstreams.items()):
            member = wanted.get(name)
            if member is not None and member.way() == upstream.member.way():
                upstream.describe(member)
            else:
                upstream.pool.close()
                del self._upstreams[name]
        for name, member in wanted.items():
            if name not in self._upstreams:
                try:
                    self._upstreams[name] = Upstream(member, *self._settings)
                except TlsError as exc:
                    logger.error("worker %s: %s", name, exc)

    def expire_idle(self) -> None:
        """Close connections that have been idle for too long."""
        for upstream in self._upstreams.values():
            upstream.pool.expire()

    def close(self) -> None:
        """Close all idle connections."""
        self.set(())

    def __getitem__(self, name: str) -> Upstream:
        return self._upstreams[name]

    def get(self, name: str, default: Upstream | None = None) -> Upstream | None:  # type: ignore[override]
        """As of any mapping, but not in Python and by an exception."""
        return self._upstreams.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._upstreams)

    def __len__(self) -> int:
        return len(self._upstreams)
