"""The command line: up | serve | worker | simulate | check | place ... A known fault is one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from omni_proxy import __version__
from omni_proxy.cli.arguments import EXIT_USAGE, Commands, Parser
from omni_proxy.cli.configs import add_configs
from omni_proxy.cli.gateway import add_gateway
from omni_proxy.cli.planning import add_planning
from omni_proxy.cli.watching import add_top, add_trace
from omni_proxy.cli.worker import add_worker
from omni_proxy.config import ConfigError
from omni_proxy.explain_command import add_explain
from omni_proxy.operate import add_operating


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    options = parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        print(f"omni-proxy {options.command}: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    """All commands."""
    made = Parser(prog="omni-proxy", description="A PD-disaggregated serving gateway for large language models.")
    made.add_argument("--version", action="version", version=f"omni-proxy {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    add_gateway(commands)
    add_worker(commands)
    add_configs(commands)
    add_top(commands)
    add_trace(commands)
    add_explain(commands)
    add_operating(commands)
    add_planning(commands)
    _add_completion(commands)
    return made


def _add_completion(commands: Commands) -> None:
    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    from omni_proxy.completion import script

    print(script(parser(), options.shell))
    return 0
