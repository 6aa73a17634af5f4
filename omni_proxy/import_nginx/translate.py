"""From nginx's blocks to a config of ours: walks servers and locations, and finds what is in force where. Pure.

nginx chooses by host and path, the gateway by the model that a request names. So all locations that pass requests on
become one gateway, and the settings in force there become its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from omni_proxy.config import ConfigError
from omni_proxy.import_nginx.draft import Draft
from omni_proxy.import_nginx.notes import Fate, Notes
from omni_proxy.import_nginx.reasons import reason_of
from omni_proxy.import_nginx.settings import MAIN, PROXIED, absolute
from omni_proxy.import_nginx.syntax import Directive, Parsed, host_port, parameters
from omni_proxy.import_nginx.upstreams import Roles, Scope, Upstreams

_BLOCKS: Final = frozenset({"http", "server", "location", "upstream"})
TLS_OUT: Final = frozenset(
    {"proxy_ssl_certificate", "proxy_ssl_certificate_key", "proxy_ssl_trusted_certificate"}
    | {"proxy_ssl_verify", "proxy_ssl_name"}
)
TLS_IN: Final = frozenset({"ssl_certificate", "ssl_certificate_key", "ssl_client_certificate", "ssl_verify_client"})
_SPOKEN_OF: Final = _BLOCKS | PROXIED.keys() | TLS_OUT | TLS_IN | {"include", "listen", "proxy_pass", "log_format"}
"""Directives whose fate is noted where they are used, or that have none."""
_USUAL_PATHS: Final = frozenset({"/", "/v1", "/v1/"})


def translate(parsed: Parsed, roles: Roles) -> tuple[dict[str, Any], Notes]:
    """The data of a config file of ours, and what became of each directive. Raises ConfigError."""
    notes = Notes()
    translation = _Translation(parsed.top, Draft(notes), roles)
    translation.run()
    for sentence in parsed.missing:
        notes.add_missing(sentence)
    return translation.draft.data(), notes


class _Translation:
    def __init__(self, main: Directive, draft: Draft, roles: Roles) -> None:
        self.draft = draft
        self._notes = draft.notes
        self._main = main
        self._http = next(main.blocks("http"), None)
        self._roles = roles
        self._listens = False
        self._tls_in = False

    def run(self) -> None:
        for directive in self._main.block:
            if directive.name in MAIN:
                MAIN[directive.name](self.draft, [directive])
            elif directive.name not in _SPOKEN_OF:
                self._say_reason(directive)
        if self._http is None:
            raise ConfigError(f"{self._main.where}: has no http block")
        upstreams = Upstreams(self.draft, self._main, self._http, self._roles)
        self._check_roles(upstreams)
        scope = self._narrowed({}, self._http)
        served = [self._server(server, scope, upstreams) for server in self._http.blocks("server")]
        if not any(served):
            raise ConfigError(f"{self._main.where}: no location passes requests on (proxy_pass)")
        upstreams.note_unused()
        self._say_rest(self._http)

    def _check_roles(self, upstreams: Upstreams) -> None:
        for name in sorted((self._roles.prefill | self._roles.decode) - upstreams.names()):
            raise ConfigError(f"{self._main.where}: there is no upstream {name!r}")

    # --------------------------------------------------------------- servers, locations

    def _server(self, server: Directive, scope: Scope, upstreams: Upstreams) -> bool:
        """Carry over one server; False when it passes nothing on."""
        scope = self._narrowed(scope, server)
        places = [*_places(server, scope, self._narrowed)]
        if not places:
            self._notes.add(Fate.LOST, server, "passes nothing on to workers")
            return False
        for listen in server.blocks("listen"):
            self._listen(listen, scope)
        if not any(server.blocks("listen")) and not self._listens:
            self._listens = True
            self.draft.set("listen", {"host": "0.0.0.0", "port": 80}, server)
        for place, inner, passing in places:
            self._place(place, inner, passing, upstreams)
        self._say_rest(server)
        return True

    def _place(self, place: Directive, scope: Scope, passing: Directive, upstreams: Upstreams) -> None:
        """One location that passes requests on."""
        found = re.fullmatch(r"(https?)://([^/$]+)(/[^$]*)?", passing.value)
        if found is None:
            self._notes.add(Fate.LOST, passing, "only http://NAME and https://NAME without variables")
            return
        scheme, name, path = found[1], found[2], found[3] or "/"
        if path != "/":
            self._notes.add(Fate.LOST, passing, "paths go on to the workers unchanged", path)
        if place.name == "location" and place.args[-1] not in _USUAL_PATHS:
            reason = "workers are chosen by the model that a request names, not by its path"
            self._notes.add(Fate.CHANGED, place, reason)
        upstreams.add(name, scheme, scope, passing)
        for key, directives in scope.items():
            if key in PROXIED:
                PROXIED[key](self.draft, directives)
            elif key in TLS_OUT and scheme == "https":
                self._notes.add(Fate.CARRIED, directives[-1], "")

    def _narrowed(self, scope: Scope, block: Directive) -> Scope:
        """The directives in force in a block, given those around it."""
        own: dict[str, list[Directive]] = {}
        for directive in block.block:
            if directive.name in PROXIED or directive.name in TLS_OUT or directive.name in TLS_IN:
                own.setdefault(directive.name, []).append(directive)
        return {**scope, **own}

    # --------------------------------------------------------------------------- listen

    def _listen(self, listen: Directive, scope: Scope) -> None:
        """The first address becomes ours."""
        if self._listens:
            self._notes.add(Fate.LOST, listen, "a gateway listens on one address")
            return
        address = listen.value
        try:
            host, port = host_port(f"*:{address}" if address.isdecimal() else address, 80)
        except ValueError as exc:
            self._notes.add(Fate.LOST, listen, str(exc))
            return
        self._listens = True
        given = parameters(listen.args[1:])
        ours: dict[str, Any] = {"host": "0.0.0.0" if host == "*" else host, "port": port}
        if given.get("backlog", "").isdecimal():
            ours["backlog"] = int(given["backlog"])
        if "ssl" in given:
            ours["tls"] = self._tls(listen, scope)
        for key in sorted(given.keys() - {"ssl", "backlog", "default_server", "reuseport"}):
            self._notes.add(Fate.LOST, listen, "has no counterpart", key)
        self.draft.set("listen", ours, listen)

    def _tls(self, listen: Directive, scope: Scope) -> dict[str, str]:
        certificates = scope.get("ssl_certificate", ())
        if not certificates:
            raise ConfigError(f"{listen.where}: listens with ssl, but there is no ssl_certificate")
        for other in certificates[1:]:
            self._notes.add(Fate.LOST, other, "a gateway shows one certificate")
        self._tls_in = True
        tls = {"certificate": self._file(certificates[0])}
        if keys := scope.get("ssl_certificate_key"):
            tls["key"] = self._file(keys[0])
        verify = [d for d in scope.get("ssl_verify_client", ()) if d.value != "off"]
        if verify and verify[-1].value == "on" and (authority := scope.get("ssl_client_certificate")):
            tls["client_ca"] = self._file(authority[-1])
            self._notes.add(Fate.CARRIED, verify[-1], "")
        elif verify:
            self._notes.add(Fate.LOST, verify[-1], "certificates of clients are demanded or not looked at")
        return tls

    def _file(self, directive: Directive) -> str:
        self._notes.add(Fate.CARRIED, directive, "")
        return absolute(directive.value, self._main)

    # ----------------------------------------------------------------------- the reasons

    def _say_rest(self, block: Directive) -> None:
        """Give the reason for each directive of a block that has no setting of ours; nested locations too."""
        for directive in block.block:
            if directive.name in ("location", "if"):
                self._say_location(directive)
            elif directive.name in TLS_IN and not self._tls_in:
                self._notes.add(Fate.LOST, directive, "no address that was carried over listens with ssl")
            elif directive.name not in _SPOKEN_OF:
                self._say_reason(directive)

    def _say_location(self, location: Directive) -> None:
        if location.name == "if":
            self._say_reason(location)
        elif any(True for _ in _passing(location)):
            self._say_rest(location)
        else:
            self._notes.add(Fate.LOST, location, "passes nothing on to workers")

    def _say_reason(self, directive: Directive) -> None:
        fate, reason = reason_of(directive.name)
        self._notes.add(fate, directive, reason)


_Narrow = Callable[[Scope, Directive], Scope]


def _places(block: Directive, scope: Scope, narrowed: _Narrow) -> Iterator[tuple[Directive, Scope, Directive]]:
    """Every location that passes requests on, at any depth, with what is in force there and its `proxy_pass`."""
    for passing in block.blocks("proxy_pass"):
        yield block, scope, passing
    for inner in block.block:
        if inner.name == "location":
            yield from _places(inner, narrowed(scope, inner), narrowed)


def _passing(block: Directive) -> Iterator[Directive]:
    yield from block.blocks("proxy_pass")
    for inner in block.blocks("location"):
        yield from _passing(inner)
