"""What commands have in common: the parser, the kinds of values, where the log goes."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Final, NoReturn, TypeAlias

EXIT_USAGE: Final = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (try --help)\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def _number(text: str, least: int, most: int | None, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{what}, got {text!r}")
    return value


def count(text: str) -> int:
    """A number of workers or processes."""
    return _number(text, 1, 64, "must be a whole number from 1 to 64")


def whole(text: str) -> int:
    """0 or more."""
    return _number(text, 0, None, "must be a whole number, 0 or more")


def positive(text: str) -> int:
    """Above 0."""
    return _number(text, 1, None, "must be a whole number above 0")


def port(text: str) -> int:
    """A port, or 0."""
    return _number(text, 0, 65535, "must be a port from 0 to 65535")


def seconds(text: str) -> float:
    """A time, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def interval(text: str) -> float:
    """A time between two looks."""
    value = seconds(text)
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"must be at least 0.1 s, got {text!r}")
    return value


def add_expert_parallel(command: argparse.ArgumentParser) -> None:
    """How the experts of a worker are spread over processes."""
    command.add_argument("--expert-parallel", type=count, default=1, metavar="N", help="processes that share experts")
    command.add_argument("--expert-redundancy", type=whole, default=None, metavar="N", help="extra replicas per layer")
    command.add_argument("--expert-window", type=whole, default=256, metavar="STEPS", help="0 never moves experts")


def add_drafts(command: argparse.ArgumentParser) -> None:
    """Who drafts tokens that a worker checks together."""
    command.add_argument("--speculation", choices=("ngram", "head", "off"), default="ngram", help="who drafts")
    command.add_argument("--draft-model", default=None, metavar="DIR", help="an EAGLE head, for --speculation head")


def log_to_stderr(level: str) -> None:
    """Show log lines of this level and above."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for talkative in ("httpx", "httpcore"):  # their debug lines hold heads, and those hold keys
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
