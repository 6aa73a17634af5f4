"""`upstream` blocks and addresses of `proxy_pass` as workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_proxy.import_nginx.draft import Draft
from omni_proxy.import_nginx.notes import Fate
from omni_proxy.import_nginx.reasons import reason_of
from omni_proxy.import_nginx.settings import absolute, bearer, positive
from omni_proxy.import_nginx.syntax import Directive, host_port, parameters, seconds

Scope = Mapping[str, Sequence[Directive]]
"""The directives in force in one place, by name."""

_LOST_PARAMETERS: Final = {
    "resolve": "a name is resolved when a connection is opened, and all its addresses are one worker",
    "route": "requests go where their prefix is cached",
    "service": "SRV records are not read",
    "drain": "take the worker out of the config and reload: it drains",
}


@dataclass(frozen=True, slots=True)
class Roles:
    """Which upstreams do what; others encode if named so, or do both legs. `connector` is for prefill and decode."""

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()
    connector: str = "vllm-nixl"

    def of(self, upstream: str) -> dict[str, str]:
        """Role and connector of an upstream's workers: as said, or as its name says."""
        name = upstream.lower()
        if upstream in self.prefill or (upstream not in self.decode and "prefill" in name):
            return {"role": "prefill", "connector": self.connector}
        if upstream in self.decode or "decode" in name:
            return {"role": "decode", "connector": self.connector}
        return {"role": "encode" if "encode" in name else "mixed", "connector": "aggregated"}


class Upstreams:
    """The `upstream` blocks of a config; each is carried over once, when something is passed to it."""

    def __init__(self, draft: Draft, main: Directive, http: Directive, roles: Roles) -> None:
        self._draft = draft
        self._main = main
        self._roles = roles
        self._blocks = {block.value: block for block in http.blocks("upstream")}
        self._done: dict[str, str | None] = {}
        """What was carried over, with the key that is shown to its workers."""

    def names(self) -> set[str]:
        return set(self._blocks)

    def add(self, name: str, scheme: str, scope: Scope, directive: Directive) -> None:
        """Carry over what a `proxy_pass` names: an upstream block, or an address."""
        key = bearer(scope.get("proxy_set_header", ()))
        if name in self._done:
            if key != self._done[name]:
                self._draft.notes.add(Fate.LOST, directive, "a worker gets one key, whoever asks")
            return
        self._done[name] = key
        block = self._blocks.get(name)
        common = {**self._roles.of(name), **self._key(scope), **self._tls(scheme, scope, name, directive)}
        if block is None:
            self._add_server(name, directive, name, scheme, common, 443 if scheme == "https" else 80)
            return
        for inner in block.block:
            if inner.name == "server":
                self._add_server(name, inner, inner.value, scheme, {**common, **self._parameters(inner)}, 80)
            else:
                self._setting(inner)

    def note_unused(self) -> None:
        """Say which upstreams nothing is passed to."""
        for name, block in self._blocks.items():
            if name not in self._done:
                self._draft.notes.add(Fate.LOST, block, "nothing is passed to it")

    def _add_server(
        self, stem: str, directive: Directive, address: str, scheme: str, common: dict[str, Any], port: int
    ) -> None:
        try:
            host, port = host_port(address, port)
        except ValueError as exc:
            self._draft.notes.add(Fate.LOST, directive, str(exc))
            return
        shown = f"[{host}]" if ":" in host else host
        self._draft.add_worker(stem, {"url": f"{scheme}://{shown}:{port}", **common}, directive)

    def _setting(self, directive: Directive) -> None:
        if directive.name == "keepalive":
            self._draft.convert("keepalive.max_idle", int, directive)
        elif directive.name == "keepalive_timeout":
            self._draft.convert("keepalive.idle_s", positive(seconds), directive)
        else:
            self._draft.notes.add(reason_of(directive.name)[0], directive, reason_of(directive.name)[1])

    def _parameters(self, server: Directive) -> dict[str, Any]:
        """The parameters of one `server` line as settings of a worker."""
        settings: dict[str, Any] = {}
        for key, value in parameters(server.args[1:]).items():
            text = f"{key}={value}" if value else key
            if key in ("backup", "down"):
                settings[key] = True
            elif key in _LOST_PARAMETERS:
                self._draft.notes.add(Fate.LOST, server, _LOST_PARAMETERS[key], text)
            elif key == "max_conns" and value == "0":
                self._draft.notes.add(Fate.CHANGED, server, "max_seqs always bounds a worker", text)
            else:
                self._number(server, key, value, text, settings)
        return settings

    def _number(self, server: Directive, key: str, value: str, text: str, settings: dict[str, Any]) -> None:
        try:
            match key:
                case "weight":
                    settings["weight"] = positive(int)(value)
                case "max_fails":
                    settings["max_fails"] = abs(int(value))
                case "fail_timeout":
                    settings["fail_timeout_s"] = positive(seconds)(value)
                case "slow_start":
                    settings["slow_start_s"] = seconds(value)
                case "max_conns":
                    settings["max_seqs"] = int(positive(int)(value))
                case _:
                    self._draft.notes.add(Fate.LOST, server, "has no counterpart", text)
        except ValueError as exc:
            self._draft.notes.add(Fate.LOST, server, str(exc), text)

    def _key(self, scope: Scope) -> dict[str, str]:
        headers = scope.get("proxy_set_header", ())
        key = bearer(headers)
        if key is None:
            return {}
        for header in headers:
            if header.value.lower() == "authorization":
                self._draft.notes.add(Fate.CARRIED, header, "")
        return {"api_key": key}

    def _tls(self, scheme: str, scope: Scope, name: str, directive: Directive) -> dict[str, Any]:
        """`proxy_ssl_*` as a worker's tls. nginx checks nothing unless told to."""
        if scheme != "https":
            return {}
        said = {key: found[-1].value for key, found in scope.items() if key.startswith("proxy_ssl_") and found}
        tls: dict[str, Any] = {}
        for ours, theirs in (("certificate", "proxy_ssl_certificate"), ("key", "proxy_ssl_certificate_key")):
            if theirs in said:
                tls[ours] = absolute(said[theirs], self._main)
        if said.get("proxy_ssl_verify", "off") != "on":
            reason = "as in nginx, nobody checks these workers' certificates: set tls.ca and tls.verify"
            self._draft.notes.add(Fate.CHANGED, directive, reason)
            return {"tls": {**tls, "verify": False}}
        if "proxy_ssl_trusted_certificate" in said:
            tls["ca"] = absolute(said["proxy_ssl_trusted_certificate"], self._main)
        # Without a name of its own, nginx checks for the one in `proxy_pass`, which may be that of the upstream.
        given = said.get("proxy_ssl_name", name if name in self._blocks else "")
        return {"tls": {**tls, "server_name": given} if given and "$" not in given else tls}
