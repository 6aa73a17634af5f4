"""The commands that make or look at configs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omni_proxy.cli.arguments import Commands, Parser
from omni_proxy.config import ConfigError, ConnectorName, effective, load


def add_configs(commands: Commands) -> None:
    """Add the commands."""
    _add_check(commands)
    _add_key(commands)
    commands.add_parser("schema", help="print the JSON schema of the config, for editors").set_defaults(run=_schema)
    _add_import_nginx(commands)
    _add_deploy(commands)


def _add_check(commands: Commands) -> None:
    check = commands.add_parser("check", help="validate a config and print its effective values")
    check.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    check.set_defaults(run=_check)


def _add_key(commands: Commands) -> None:
    key = commands.add_parser("key", help="make an API key, and the hash of it that stands in a config")
    key.add_argument("--stdin", action="store_true", help="print the hash of the key that is typed or piped in")
    key.set_defaults(run=_key)


def _add_import_nginx(commands: Commands) -> None:
    importing = commands.add_parser("import-nginx", help="turn an nginx config into one of ours")
    importing.add_argument("source", type=Path, metavar="NGINX.CONF")
    importing.add_argument("-o", "--output", type=Path, default=None, metavar="FILE", help="default: standard output")
    for leg in ("prefill", "decode"):
        help_text = f"this upstream's workers do {leg}; default: those whose name says so"
        importing.add_argument(f"--{leg}", action="append", default=[], metavar="UPSTREAM", help=help_text)
    names = [name.value for name in ConnectorName]
    importing.add_argument("--connector", choices=names, default="vllm-nixl", help="of prefill and decode workers")
    importing.set_defaults(run=_import_nginx)


def _add_deploy(commands: Commands) -> None:
    deploy = commands.add_parser("deploy", help="make what starts an xPyD deployment from a recipe")
    what = deploy.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=Parser)
    render = what.add_parser("render", help="make units, manifests or scripts")
    render.add_argument("recipe", type=Path, metavar="RECIPE")
    render.add_argument("--to", choices=("systemd", "compose", "kubernetes", "shell"), required=True)
    render.add_argument("-o", "--output", type=Path, default=None, metavar="DIR", help="default: standard output")
    render.set_defaults(run=_deploy_render)


def _check(options: argparse.Namespace) -> int:
    from omni_proxy.parts import check_certificates
    from omni_proxy.reload import needs_restart

    config = load(options.config)
    check_certificates(config)
    print(effective(config), end="")
    print(f"# A change of these needs a restart: {', '.join(needs_restart())}. SIGHUP takes over all others.")
    return 0


def _schema(options: argparse.Namespace) -> int:
    from omni_proxy.schema import config_schema

    print(config_schema(), end="")
    return 0


def _key(options: argparse.Namespace) -> int:
    from omni_proxy.access.keys import hash_key, make_key

    if not options.stdin:
        key = make_key()
        print(f"key:  {key}\nhash: {hash_key(key)}")
        return 0
    key = sys.stdin.readline().strip()
    if len(key) < 16 or not key.isascii() or " " in key:
        raise ConfigError("a key must have 16 characters or more, ASCII and no spaces")
    print(hash_key(key))
    return 0


def _import_nginx(options: argparse.Namespace) -> int:
    from omni_proxy.import_nginx.command import ImportOptions, run_import

    roles = tuple(options.prefill), tuple(options.decode)
    return run_import(ImportOptions(options.source, options.output, *roles, options.connector))


def _deploy_render(options: argparse.Namespace) -> int:
    from omni_proxy.deploy.command import run_render

    return run_render(options.recipe, options.to, options.output, print)
