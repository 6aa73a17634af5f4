"""The commands `workers …` and `reload`: an operator's calls to the admin port, from a shell."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import yaml

from omni_proxy.config import ConfigError

EXIT_REFUSED: Final = 1
_TIMEOUT_S: Final = 30.0
_COLUMNS: Final = ("name", "role", "state", "weight", "sequences", "kv_tokens", "source", "url")


def add_operating(commands: Any) -> None:
    """Add both commands to the parser's."""
    workers = commands.add_parser("workers", help="list, add, drain, take back, remove or weigh workers of a gateway")
    verbs = workers.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = _verb(verbs, "list", "show all workers, their sources and what is ordered about them")
    listing.add_argument("--json", action="store_true", help="print JSON")
    add = _verb(verbs, "add", "add a worker")
    add.add_argument("name", metavar="NAME")
    add.add_argument("url", metavar="URL")
    add.add_argument("--role", required=True, metavar="ROLE", help="prefill, decode, mixed or encode")
    setting = "any other key of `workers` in the config, such as connector=sglang (several)"
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    for verb, what in (
        ("drain", "no new work for a worker; what it has ends"),
        ("undrain", "use it again as soon as it answers"),
        ("remove", "drain a worker, then forget it"),
    ):
        _verb(verbs, verb, what).add_argument("name", metavar="NAME")
    weight = _verb(verbs, "weight", "give a worker another share")
    weight.add_argument("name", metavar="NAME")
    weight.add_argument("value", metavar="WEIGHT", help="above 0; default: as its source says")
    role = _verb(verbs, "role", "give a worker another role as soon as it is idle")
    role.add_argument("name", metavar="NAME")
    role.add_argument("value", metavar="ROLE", help="prefill, decode, mixed or encode; default: as its source says")
    reload = commands.add_parser("reload", help="have a gateway load its config file again")
    _add_target(reload)
    reload.set_defaults(verb="reload")
    for command in (workers, reload):
        command.set_defaults(run=lambda options: operate(options, print))


def _verb(verbs: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=what)
    _add_target(parser)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", required=True, metavar="URL", help="of the admin port, as http://127.0.0.1:9000")
    parser.add_argument("--token-file", type=Path, default=None, metavar="FILE", help="holds the admin port's token")


def operate(options: argparse.Namespace, out: Callable[[str], None]) -> int:
    """Make the call; 0: it is as asked for, 1: the gateway refused. Raises ConfigError."""
    method, path, body = _call(options)
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            url = options.admin.rstrip("/") + path
            answer = client.request(method, url, json=body, headers=_headers(options.token_file))
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ConfigError(f"--admin {options.admin}: cannot be reached ({exc})") from exc
    said = _json(answer)
    if answer.status_code != 200:
        error = said.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        out(f"refused ({answer.status_code}): {message or answer.text[:200]}")
        return EXIT_REFUSED
    for line in _shown(options, said):
        out(line)
    return 0


def _headers(token_file: Path | None) -> dict[str, str]:
    if token_file is None:
        return {}
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--token-file {token_file}: {getattr(exc, 'strerror', None) or 'is not text'}") from exc
    if not token.isascii() or not token.isprintable() or not token:
        raise ConfigError(f"--token-file {token_file}: must hold one token")
    return {"authorization": f"Bearer {token}"}


def _call(options: argparse.Namespace) -> tuple[str, str, dict[str, object] | None]:
    verb = options.verb
    if verb == "reload":
        return "POST", "/omni/reload", None
    if verb == "list":
        return "GET", "/omni/workers", None
    if verb == "add":
        return (
            "POST",
            "/omni/workers",
            {"name": options.name, "url": options.url, "role": options.role} | _settings(options.set),
        )
    path = f"/omni/workers/{quote(options.name, safe='')}"
    if verb == "remove":
        return "DELETE", path, None
    if verb in ("weight", "role"):
        return "PUT", f"{path}/{verb}", {verb: _value(verb, options.value)}
    return "POST", f"{path}/{verb}", None


def _value(verb: str, text: str) -> object:
    if text == "default":
        return None
    if verb == "role":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"WEIGHT must be a number above 0 or 'default', got {text!r}") from None


def _settings(pairs: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            found[key] = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise ConfigError(f"--set {pair}: the value is not YAML") from exc
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE, got {pair!r}")
    return found


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _shown(options: argparse.Namespace, said: dict[str, Any]) -> list[str]:
    if options.verb == "reload":
        return [f"the config was loaded again (generation {said.get('generation')})"]
    if options.verb == "list":
        return [json.dumps(said, indent=2)] if options.json else _table(said.get("workers", []))
    how = "done" if said.get("changed") else "it was so already"
    others = "; the other gateways cannot be told now and hear of it later" if said.get("shared") is False else ""
    return [f"{options.verb} {options.name}: {how}{others}"]


def _table(workers: list[dict[str, Any]]) -> list[str]:
    rows = [[*_COLUMNS, "ordered"]]
    for worker in workers:
        ordered = ", ".join(f"{k}={v}" for k, v in worker.get("ordered", {}).items()) or "-"
        rows.append([*(str(worker.get(column)) for column in _COLUMNS), ordered])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
