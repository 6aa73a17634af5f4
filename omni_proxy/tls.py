"""TLS in both directions: contexts made of files, and made again when the files change.

Connections that are open keep what they began with; new ones get the files of the last successful load. Files that
cannot be used are reported once and change nothing. Knows neither config nor HTTP.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class TlsError(Exception):
    """A file of certificates or keys cannot be used; one line that names it."""


class ServerFiles(Struct, frozen=True):
    """What a server shows, and whose certificates its clients have to show (None: they need none)."""

    certificate: str
    key: str | None = None
    """None: it is in the same file."""
    client_ca: str | None = None


class ClientFiles(Struct, frozen=True):
    """How a server is checked, and what is shown to it. `ca` None: the system's authorities."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    verify: bool = True
    server_name: str | None = None
    """Stands for the URL's host, in the handshake and in the check of the certificate."""


class ServerTls:
    """The server side. `context` stays the same object for as long as a socket listens. Raises TlsError."""

    def __init__(self, files: ServerFiles) -> None:
        self._reloading = _Reloading(
            "the certificate of our own", (files.certificate, files.key, files.client_ca), lambda: server_context(files)
        )
        self.context: Final = self._reloading.made
        self.context.sni_callback = self._choose

    def refresh(self, force: bool = False) -> bool:
        """Load the files again if they have changed, or in any case; True when new ones are in use."""
        return self._reloading.refresh(force)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake before a certificate is shown."""
        connection.context = self._reloading.made


class ClientTls:
    """The client side towards one server. Raises TlsError."""

    def __init__(self, files: ClientFiles) -> None:
        self.server_name = files.server_name
        self._reloading = _Reloading(
            "a worker's certificates", (files.ca, files.certificate, files.key), lambda: client_context(files)
        )

    @property
    def context(self) -> ssl.SSLContext:
        """For new connections."""
        return self._reloading.made

    def refresh(self, force: bool = False) -> bool:
        """Load the files again if they have changed, or in any case; True when new ones are in use."""
        return self._reloading.refresh(force)


class _Reloading:
    """A context and the state of the files that it was made of."""

    def __init__(self, what: str, paths: Iterable[str | None], make: Callable[[], ssl.SSLContext]) -> None:
        self._what = what
        self._paths = tuple(path for path in paths if path is not None)
        self._make = make
        self._seen = self._look()
        self.made = make()

    def refresh(self, force: bool) -> bool:
        state = self._look()
        if state == self._seen and not force:
            return False
        self._seen = state
        try:
            self.made = self._make()
        except TlsError as exc:
            logger.error("%s stays as it was: %s", self._what, exc)
            return False
        logger.info("%s was loaded again", self._what)
        return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_state(path) for path in self._paths)


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def server_context(files: ServerFiles) -> ssl.SSLContext:
    """A context for listening, TLS 1.2 and above. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, files.certificate, files.key)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: ClientFiles) -> ssl.SSLContext:
    """A context for connecting, TLS 1.2 and above. Raises TlsError."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is not None:
        # Only this authority, not the system's beside it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_authorities(context, files.ca)
    if files.certificate is not None:
        _load_chain(context, files.certificate, files.key)
    if not files.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_chain(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    # Without a password of ours, OpenSSL would ask for one on the terminal.
    where = certificate if key is None else f"{certificate} with {key}"
    _loaded(where, lambda: context.load_cert_chain(certificate, key, password=lambda: b""), certificate, key)


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    _loaded(path, lambda: context.load_verify_locations(cafile=path), path)


def _loaded(where: str, load: Callable[[], None], *paths: str | None) -> None:
    for path in paths:
        if path is not None and not Path(path).is_file():
            raise TlsError(f"{path}: there is no such file")
    try:
        load()
    except ssl.SSLError as exc:
        reason = (exc.reason or "not PEM").replace("_", " ").lower()
        raise TlsError(f"{where}: cannot be used ({reason})") from exc
    except OSError as exc:
        raise TlsError(f"{where}: {exc.strerror or exc}") from exc
