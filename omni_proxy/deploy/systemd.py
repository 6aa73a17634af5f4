"""Renders units for each host: one for each worker, one for the gateway. Pure.

Quoting is systemd's own: `%` begins a specifier and `$` a variable; both are doubled where they stand for themselves.
"""

from __future__ import annotations

from omni_proxy.deploy.recipe import Deployment
from omni_proxy.deploy.started import Started, gateway_yaml, head, paired, started, stop_limit_s

_WORKER_STOP_S = 30


def render(deployment: Deployment) -> dict[str, str]:
    """Texts by path."""
    name, gateway = deployment.recipe.name, deployment.recipe.gateway
    files = {}
    for host in deployment.hosts():
        for worker in deployment.on(host):
            said = f"{worker.launch.name} of {name} ({worker.launch.engine.value})"
            unit = _unit(deployment, said, started(worker), _WORKER_STOP_S)
            files[f"{host}/{name}-{worker.launch.name}.service"] = unit
        if host == gateway.host:
            line = ("omni-proxy", "serve", "-c", f"/etc/omni-proxy/{name}-gateway.yaml")
            unit = _unit(
                deployment, f"gateway of {name}", Started(line, gateway.env), stop_limit_s(deployment), reloads=True
            )
            files[f"{host}/{name}-gateway.service"] = unit
            files[f"{host}/{name}-gateway.yaml"] = gateway_yaml(deployment)
    return files


def _unit(deployment: Deployment, said: str, program: Started, stop_s: int, reloads: bool = False) -> str:
    env = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in program.env.items())
    words = [[_quoted(word).replace("$", "$$") for word in line] for line in paired(program.line)]
    line = " \\\n  ".join(" ".join(line) for line in words)
    reload_line = "ExecReload=/bin/kill -HUP $MAINPID\n" if reloads else ""
    return (
        f"{head(deployment, said)}"
        f"[Unit]\nDescription={said}\nWants=network-online.target\nAfter=network-online.target\n\n"
        f"[Service]\n{env}ExecStart=/usr/bin/env {line}\n{reload_line}"
        f"Restart=always\nRestartSec=5\nKillMode=mixed\nTimeoutStopSec={stop_s}\nLimitNOFILE=1048576\n"
        "NoNewPrivileges=yes\n\n[Install]\nWantedBy=multi-user.target\n"
    )


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if escaped == word and word and not set(word) & set(" '\t;") else f'"{escaped}"'
