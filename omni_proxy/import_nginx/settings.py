"""Directives that have a setting of ours, each with the function that carries it over. Pure.

A function gets the directives of one name that are in force in one place: nginx inherits a name as a whole, so these
are all of the innermost block that has any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from omni_proxy.import_nginx.draft import Draft
from omni_proxy.import_nginx.notes import Fate
from omni_proxy.import_nginx.syntax import Directive, seconds, size_bytes

Directives = Sequence[Directive]
_MOST_RETRIES: Final = 10
_MOST_PROCESSES: Final = 64


def positive(read: Callable[[str], float]) -> Callable[[str], float]:
    """Like `read`, for values where 0 would switch a limit off. The result raises ValueError for it."""

    def checked(text: str) -> float:
        value = read(text)
        if value <= 0:
            raise ValueError("there is no such thing as unlimited or off here; the default stays")
        return value

    return checked


def _plain(path: str, read: Callable[[str], float]) -> Callable[[Draft, Directives], None]:
    """A directive whose first argument is a value of ours."""

    def carry(draft: Draft, found: Directives) -> None:
        draft.convert(path, positive(read), found[-1])

    return carry


def _read_timeout(draft: Draft, found: Directives) -> None:
    """nginx has one limit for the wait for an answer and for each wait within it."""
    for path in ("timeouts.first_byte_s", "timeouts.inter_chunk_s"):
        draft.convert(path, positive(seconds), found[-1])


def _buffering(draft: Draft, found: Directives) -> None:
    on = found[-1].value != "off"
    reason = "streams go out as they come; a slow client slows its worker down"
    draft.notes.add(Fate.CHANGED if on else Fate.UNNEEDED, found[-1], reason)


def _next_upstream(draft: Draft, found: Directives) -> None:
    if found[-1].value == "off":
        draft.set("retries.max", 0, found[-1])
        return
    reason = "retried is what cannot have been processed, and what a busy worker (429, 503) refused"
    draft.notes.add(Fate.CHANGED, found[-1], reason)


def _tries(draft: Draft, found: Directives) -> None:
    tries = int(found[-1].value) if found[-1].value.isdecimal() else 0
    retries = min(tries - 1, _MOST_RETRIES) if tries else _MOST_RETRIES
    bounded = f"retries are bounded by {_MOST_RETRIES}" if retries != tries - 1 else ""
    draft.set("retries.max", retries, found[-1], bounded)


def _access_log(draft: Draft, found: Directives) -> None:
    first, *others = found
    for other in others:
        draft.notes.add(Fate.LOST, other, "there is one access log")
    path = first.value
    if path == "off":
        draft.notes.add(Fate.CARRIED, first, "")
    elif path.startswith("syslog:") or "$" in path:
        draft.notes.add(Fate.LOST, first, "the access log is one file, or standard output (-)")
    else:
        draft.set("access_log.path", path, first)
        _log_format(draft, first)


def _log_format(draft: Draft, log: Directive) -> None:
    name = next((arg for arg in log.args[1:] if "=" not in arg), "combined")
    for arg in log.args[1:]:
        if arg.startswith("if="):
            draft.notes.add(Fate.LOST, log, "every request is logged", arg)
    own = name != "combined"
    reason = f"format {name} became ours: json has the timeline of each request, combined is nginx's"
    draft.set("access_log.format", "json" if "json" in name.lower() else "combined", log, reason if own else "")


def _proxy_headers(draft: Draft, found: Directives) -> None:
    for header in found:
        name, value = header.value.lower(), " ".join(header.args[1:])
        if name in _OUR_HEADERS:
            draft.notes.add(Fate.UNNEEDED, header, "the gateway sets it as workers expect it")
        elif name in _UNREAD_HEADERS:
            draft.notes.add(Fate.UNNEEDED, header, "engines do not look at it")
        elif name == "authorization" and value.startswith("Bearer ") and "$" not in value:
            continue  # a worker's api_key
        elif value == f"$http_{name.replace('-', '_')}":
            draft.notes.add(Fate.UNNEEDED, header, "headers of clients go on to the workers")
        else:
            draft.notes.add(Fate.LOST, header, "headers are not added to what goes to workers")


_OUR_HEADERS: Final = frozenset({"host", "connection", "x-forwarded-for", "x-request-id", "content-length"})
_UNREAD_HEADERS: Final = frozenset(
    {"upgrade", "x-real-ip", "x-forwarded-proto", "x-forwarded-host", "x-forwarded-port"}
)


def bearer(found: Directives) -> str | None:
    """The key that nginx shows to workers, if it is written in the config."""
    for header in found:
        words = " ".join(header.args[1:]).split()
        if header.value.lower() == "authorization" and len(words) == 2 and words[0] == "Bearer" and "$" not in words[1]:
            return words[1]
    return None


def _processes(draft: Draft, found: Directives) -> None:
    value = found[-1].value
    if not value.isdecimal():
        draft.notes.add(Fate.CHANGED, found[-1], "one process serves well; set `processes` when its core is busy")
    else:
        draft.set("processes", max(1, min(int(value), _MOST_PROCESSES)), found[-1])


def absolute(path: str, main: Directive) -> str:
    """nginx takes relative names from the folder of its config."""
    return str(PurePath(main.where).parent / path)


MAIN: Final[Mapping[str, Callable[[Draft, Directives], None]]] = {
    "worker_processes": _processes,
    "worker_shutdown_timeout": _plain("timeouts.drain_s", seconds),
}

PROXIED: Final[Mapping[str, Callable[[Draft, Directives], None]]] = {
    "client_max_body_size": _plain("limits.client_max_body_bytes", size_bytes),
    "client_body_timeout": _plain("timeouts.client_body_s", seconds),
    "send_timeout": _plain("timeouts.client_send_s", seconds),
    "keepalive_timeout": _plain("timeouts.client_keepalive_s", seconds),
    "proxy_connect_timeout": _plain("timeouts.connect_s", seconds),
    "proxy_read_timeout": _read_timeout,
    "proxy_buffering": _buffering,
    "proxy_next_upstream": _next_upstream,
    "proxy_next_upstream_tries": _tries,
    "proxy_set_header": _proxy_headers,
    "access_log": _access_log,
}
