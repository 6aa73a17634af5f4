"""The commands that watch a gateway: `top` and `trace`."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_proxy.cli.arguments import Commands, interval, positive


def add_top(commands: Commands) -> None:
    """Add `top`."""
    top = commands.add_parser("top", help="watch a gateway in the terminal")
    top.add_argument("url", nargs="?", default=None, metavar="URL", help="default: http://127.0.0.1:8000")
    top.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="address and token from a config")
    top.add_argument("--token-file", type=Path, default=None, metavar="FILE", help="holds the admin port's token")
    top.add_argument("--once", action="store_true", help="print one snapshot and end")
    top.add_argument("--width", type=positive, default=None, metavar="COLUMNS", help="of --once (default: terminal)")
    top.add_argument("--interval", type=interval, default=1.0, metavar="SECONDS", help="default 1")
    top.set_defaults(run=_top)


def add_trace(commands: Commands) -> None:
    """Add `trace`."""
    trace = commands.add_parser("trace", help="save requests' timelines for chrome://tracing or Perfetto")
    trace.add_argument("id", nargs="?", default=None, metavar="ID", help="an x-request-id (default: the last requests)")
    trace.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway (default: %(default)s)")
    trace.add_argument("--limit", type=positive, default=200, metavar="N", help="ended requests (default 200)")
    trace.add_argument("--out", type=Path, default=None, metavar="FILE", help="default: standard output")
    trace.set_defaults(run=_trace)


def _top(options: argparse.Namespace) -> int:
    from omni_proxy.ui.top.command import run_top

    return run_top(options, print)


def _trace(options: argparse.Namespace) -> int:
    from omni_proxy.trace_command import run_trace

    return run_trace(options.url, options.id, options.limit, options.out, print)
