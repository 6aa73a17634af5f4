"""`omni-proxy top`: which gateway, with which token, once or again and again."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omni_proxy.config import ConfigError, load
from omni_proxy.ui.top.screen import render
from omni_proxy.ui.top.state import Source, Unreadable
from omni_proxy.ui.top.text import plain

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_top(options: argparse.Namespace, out: Callable[[str], None]) -> int:
    """Show a gateway; returns the exit code. Raises ConfigError."""
    url, token = _target(options.url, options.config)
    if options.token_file is not None:
        token = _token(options.token_file)
    source = Source(url, token)
    try:
        first = source.read()
        if options.once:
            width = options.width or shutil.get_terminal_size((120, 40)).columns
            out(plain(render(first, width)).rstrip("\n"))
            return 0
        if not sys.stdout.isatty():
            raise ConfigError("standard output is no terminal; --once prints one snapshot")
        from omni_proxy.ui.top.terminal import watch

        watch(source, first, options.interval)
    except Unreadable as exc:
        raise ConfigError(str(exc)) from exc
    finally:
        source.close()
    return 0


def _target(url: str | None, config: Path | None) -> tuple[str, str | None]:
    """Where the state is, and the token for it."""
    if url is not None and config is not None:
        raise ConfigError("give a URL or -c, not both")
    if config is None:
        return url or DEFAULT_URL, None
    found = load(config)
    if found.admin is not None:
        token = found.admin.token or next(iter(found.admin.tokens.values()), None)
        return _url("http", found.admin.host, found.admin.port), token
    return _url("http" if found.listen.tls is None else "https", found.listen.host, found.listen.port), None


def _url(scheme: str, host: str, port: int) -> str:
    host = _ANY.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--token-file: cannot read {path}: {exc}") from exc
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-file: {path} holds no token")
    return token
