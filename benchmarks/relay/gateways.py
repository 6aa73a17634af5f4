"""The gateways that are compared: how each is had, configured and started.

Each runs as its makers ship it, logging and metrics included: only ports, workers and the policy
are set, and for nginx what any streaming upstream needs (keep-alive, no buffering).
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.relay.build import Missing, compile_tool, find_program, peer_program
from benchmarks.relay.omni import omni_config

VLLM_ROUTER: Final = ("vllm-router", "0.1.17")
SGLANG_ROUTER: Final = ("sglang-router", "0.3.2")
_BOOTSTRAP_PORT: Final = "8998"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway listens, where its workers are, and where it may write."""

    port: int
    metrics_port: int
    prefill: Sequence[int]
    decode: Sequence[int]
    folder: Path
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Gateway:
    """One row of the table. `yardstick` marks the rows whose better one is ratio 1."""

    row: str
    family: str
    command: Callable[[Place], list[str]]
    pd: bool = True
    yardstick: bool = False
    extra: bool = False  # an additional row: measured once, left out of quick runs


def _floor(place: Place) -> list[str]:
    return [str(compile_tool("floor")), str(place.port), *map(str, place.decode)]


def nginx_config(port: int, workers: Sequence[int], folder: Path, processes: int = 1, method: str = "") -> str:
    """Plain balancing over some workers, with the settings that streams need. `method`: `least_conn;` or the like."""
    servers = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
    temp = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off; worker_processes {processes}; pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log {folder}/access.log; {temp}
  client_max_body_size 64m; client_body_buffer_size 1m;
  upstream workers {{ {method} {servers} keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"""


def nginx_command(folder: Path, config: str) -> list[str]:
    """Starts nginx with a config of its own. Raises Missing."""
    program = find_program("nginx", "nginx-light")
    path = folder / "nginx.conf"
    path.write_text(config)
    return [program, "-p", str(folder), "-e", f"{folder}/start.log", "-c", str(path)]


def _nginx(place: Place) -> list[str]:
    return nginx_command(place.folder, nginx_config(place.port, place.decode, place.folder, place.processes))


def rust_router(
    name: str,
    port: int,
    metrics_port: int,
    prefill: Sequence[tuple[int, str]],
    decode: Sequence[int],
    policy: str | None,
) -> list[str]:
    """The command of vllm-router or sglang-router in PD mode. `prefill`: ports with bootstrap ports, which only the
    second takes. No policy: its default. Raises Missing."""
    sglang = name == SGLANG_ROUTER[0]
    program = peer_program(*(SGLANG_ROUTER if sglang else VLLM_ROUTER))
    args = [program, "launch", "--pd-disaggregation"] if sglang else [program, "--vllm-pd-disaggregation"]
    args += ["--host", "127.0.0.1", "--port", str(port)]
    args += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    for worker, bootstrap in prefill:
        args += ["--prefill", f"http://127.0.0.1:{worker}", *([bootstrap] if sglang else [])]
    for worker in decode:
        args += ["--decode", f"http://127.0.0.1:{worker}"]
    return args if policy is None else [*args, "--policy", policy]


def _omni(place: Place) -> list[str]:
    if importlib.util.find_spec("omni_proxy") is None:
        raise Missing("omni_proxy cannot be imported by this Python")
    config = place.folder / "omni.yaml"
    log, count = place.folder / "access.log", place.processes
    text = omni_config(place.port, place.prefill, place.decode, log, processes=count)
    config.write_text(text)
    # The installed command, not `-m`: that would take the checkout's files instead of the compiled modules.
    return [str(Path(sys.executable).with_name("omni-proxy")), "serve", "-c", str(config)]


def _rust(name: str, policy: str | None) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        prefill = [(port, _BOOTSTRAP_PORT) for port in place.prefill]
        return rust_router(name, place.port, place.metrics_port, prefill, place.decode, policy)

    return command


GATEWAYS: Final = (
    Gateway("relay of bytes, no HTTP, no PD", "floor", _floor, pd=False, extra=True),
    Gateway("nginx, plain, no PD", "nginx", _nginx, pd=False),
    Gateway(
        f"vllm-router {VLLM_ROUTER[1]}, PD, round robin",
        "vllm-router",
        _rust("vllm-router", "round_robin"),
        yardstick=True,
    ),
    Gateway(
        f"vllm-router {VLLM_ROUTER[1]}, PD, cache_aware (its default)",
        "vllm-router",
        _rust("vllm-router", None),
        extra=True,
    ),
    Gateway(
        f"sglang-router {SGLANG_ROUTER[1]}, PD, round robin",
        "sglang-router",
        _rust("sglang-router", "round_robin"),
        yardstick=True,
    ),
    Gateway(
        f"sglang-router {SGLANG_ROUTER[1]}, PD, cache_aware (its default)",
        "sglang-router",
        _rust("sglang-router", None),
        extra=True,
    ),
    Gateway("omni proxy, PD", "omni", _omni),
)
FAMILIES: Final = ("floor", "nginx", "vllm-router", "sglang-router", "omni")
