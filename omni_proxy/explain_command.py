"""`omni-proxy explain ID`: asks a gateway why a request took as long as it did, and prints it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from omni_proxy.config import ConfigError
from omni_proxy.observe.explain import as_text

EXIT_UNKNOWN: Final = 1
_TIMEOUT_S: Final = 10.0


def add_explain(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser("explain", help="say why a request took as long as it did")
    command.add_argument("id", metavar="ID", help="the request's x-request-id")
    command.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="of the gateway (%(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=lambda options: print_explanation(options, print))


def print_explanation(options: argparse.Namespace, out: Callable[[str], None]) -> int:
    """Ask and print; 1 where the gateway knows no such request. Raises ConfigError."""
    url = f"{options.url.rstrip('/')}/omni/requests/{quote(options.id, safe='')}/explain"
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            answer = client.get(url)
        told = msgspec.json.decode(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ConfigError(f"--url {options.url}: cannot be reached ({exc})") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--url {options.url}: is no gateway of omni-proxy") from exc
    if answer.status_code == 200 and isinstance(told, dict) and "parts" in told:
        out(answer.text if options.json else as_text(told))
        return 0
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if message is None:
        raise ConfigError(f"--url {options.url}: is no gateway of omni-proxy")
    out(message)
    return EXIT_UNKNOWN
