"""What the headers of a request say: to the workers, to which they go on, and to us. Pure.

Clients repeat their headers: a connection works this out once and uses it as long as it reads the same head again.
"""

from __future__ import annotations

import hashlib
from typing import Final

from omni_proxy.access.gate import CREDENTIALS
from omni_proxy.api.timing import asks_for_timing
from omni_proxy.workers.head import HOP_BY_HOP

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

_SESSION = b"x-session-id: "
_TENANT: Final = b"x-tenant-id: "
_TTFT_TARGET: Final = b"x-ttft-target-s: "
_AUTHORIZATION: Final = b"authorization: "


class Said:
    """What some headers say. `keyed`: the client's key is for us."""

    __slots__ = ("forward", "headers", "keyed", "session", "tenant", "timed", "ttft_target_s", "user_agent")

    def __init__(self, headers: list[tuple[bytes, bytes]], peer: str, keyed: bool) -> None:
        self.headers = headers
        self.keyed = keyed
        self.forward, self.user_agent = forwarded(headers, peer, keyed)
        self.session = session_of(self.forward)
        self.tenant = tenant_of(self.forward)
        self.ttft_target_s = ttft_target_of(self.forward)
        self.timed = asks_for_timing(self.forward)
        """Does the client ask where the time goes?"""


def said_in(headers: list[tuple[bytes, bytes]], peer: str, keyed: bool, last: Said | None) -> Said:
    """What headers say; `last`: what was said before, which may have been the same ones."""
    again = last is not None and last.headers is headers and last.keyed is keyed
    return last if again and last is not None else Said(headers, peer, keyed)


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
