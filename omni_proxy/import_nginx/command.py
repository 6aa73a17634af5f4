"""The command: reads, translates, validates, writes. Raises ConfigError for what the user can mend."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from omni_proxy.config import ConfigError, parse
from omni_proxy.import_nginx.syntax import read
from omni_proxy.import_nginx.translate import translate
from omni_proxy.import_nginx.upstreams import Roles


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the command line said."""

    source: Path
    output: Path | None
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    connector: str = "vllm-nixl"


def run_import(options: ImportOptions) -> int:
    """Write the config to the output, and the report to standard error; returns the exit code."""
    config, report = imported(options)
    if options.output is None:
        sys.stdout.write(config)
    else:
        try:
            options.output.write_text(config, encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"{options.output}: {exc.strerror or exc}") from exc
    sys.stderr.write(report)
    return 0


def imported(options: ImportOptions) -> tuple[str, str]:
    """The config as YAML, and the report."""
    roles = Roles(frozenset(options.prefill), frozenset(options.decode), options.connector)
    data, notes = translate(read(options.source), roles)
    if not data["workers"]:
        raise ConfigError(f"{options.source}: no worker is left:\n" + "\n".join(notes.report()))
    parse(data, str(options.source))
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=False)
    return f"# Imported from {options.source.name}\n{text}", "\n".join(notes.report()) + "\n"
