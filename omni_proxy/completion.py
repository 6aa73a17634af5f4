"""Completion scripts for shells, made from the parser of the command line by shtab.

Commands that nobody types (their names begin with `_`) are left out, and options that take files complete file names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `bash`, `zsh` or `fish`. The parser is changed: it is for this use only."""
    _prepare(parser)
    text: str = shtab.complete(parser, shell=shell)
    return text


def _prepare(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in [name for name in action.choices if name.startswith("_")]:
                del action.choices[name]
            for command in action.choices.values():
                _prepare(command)
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
