"""Renders a script for each host: it starts what runs there, and ends it all when one of them ends. Pure."""

from __future__ import annotations

import shlex

from omni_proxy.deploy.recipe import Deployment
from omni_proxy.deploy.started import Started, gateway_yaml, head, paired, started

_BEGIN = """set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
"""
_END = """
wait -n "${pids[@]}"
"""


def render(deployment: Deployment) -> dict[str, str]:
    """Texts by path."""
    files = {f"{host}.sh": _script(deployment, host) for host in deployment.hosts()}
    return {**files, "gateway.yaml": gateway_yaml(deployment)}


def _script(deployment: Deployment, host: str) -> str:
    parts = ["#!/usr/bin/env bash\n", head(deployment, f"what runs on {host}"), _BEGIN]
    for worker in deployment.on(host):
        parts.append(f"\n# {worker.launch.name}\n{_background(started(worker))}")
    gateway = deployment.recipe.gateway
    if gateway.host == host:
        line = ("omni-proxy", "serve", "-c", "gateway.yaml")
        parts.append(f"\n# the gateway\n{_background(Started(line, gateway.env))}")
    return "".join([*parts, _END])


def _background(program: Started) -> str:
    env = [[f"{name}={value}"] for name, value in program.env.items()]
    lines = [["env"], *env, *paired(program.line)] if env else paired(program.line)
    return " \\\n  ".join(shlex.join(line) for line in lines) + " &\npids+=($!)\n"
