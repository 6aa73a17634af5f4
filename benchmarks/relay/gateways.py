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


def nginx_config(place: Place) -> str:
    """Plain balancing over the decode workers, with the settings that streams need."""
    servers = " ".join(f"server 127.0.0.1:{port};" for port in place.decode)
    temp = "".join(
        f"{kind}_temp_path {place.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off; worker_processes {place.processes}; pid {place.folder}/pid;
error_log {place.folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log {place.folder}/access.log; {temp}
  client_max_body_size 64m; client_body_buffer_size 128k;
  upstream workers {{ {servers} keepalive 512; }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"""


def _nginx(place: Place) -> list[str]:
    program = find_program("nginx", "nginx-light")
    config = place.folder / "nginx.conf"
    config.write_text(nginx_config(place))
    return [program, "-p", str(place.folder), "-e", f"{place.folder}/start.log", "-c", str(config)]


def _workers(place: Place, *bootstrap: str) -> list[str]:
    args: list[str] = []
    for port in place.prefill:
        args += ["--prefill", f"http://127.0.0.1:{port}", *bootstrap]
    for port in place.decode:
        args += ["--decode", f"http://127.0.0.1:{port}"]
    return args


def _listen(place: Place) -> list[str]:
    at = ["--host", "127.0.0.1", "--port", str(place.port)]
    return [*at, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]


def _vllm_router(*policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = peer_program(*VLLM_ROUTER)
        mode = ["--vllm-pd-disaggregation", *_workers(place), *policy]
        return [program, *_listen(place), *mode]

    return command


def _sglang_router(*policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = peer_program(*SGLANG_ROUTER)
        mode = ["--pd-disaggregation", *_workers(place, _BOOTSTRAP_PORT), *policy]
        return [program, "launch", *_listen(place), *mode]

    return command


def _omni(place: Place) -> list[str]:
    if importlib.util.find_spec("omni_proxy") is None:
        raise Missing("omni_proxy cannot be imported by this Python")
    config = place.folder / "omni.yaml"
    log, count = place.folder / "access.log", place.processes
    text = omni_config(place.port, place.prefill, place.decode, log, processes=count)
    config.write_text(text)
    # The installed command, not `-m`: that would take the checkout's files instead of the compiled modules.
    return [str(Path(sys.executable).with_name("omni-proxy")), "serve", "-c", str(config)]


_ROUND_ROBIN: Final = ("--policy", "round_robin")

GATEWAYS: Final = (
    Gateway("relay of bytes, no HTTP, no PD", "floor", _floor, pd=False, extra=True),
    Gateway("nginx, plain, no PD", "nginx", _nginx, pd=False),
    Gateway(
        f"vllm-router {VLLM_ROUTER[1]}, PD, round robin",
        "vllm-router",
        _vllm_router(*_ROUND_ROBIN),
        yardstick=True,
    ),
    Gateway(
        f"vllm-router {VLLM_ROUTER[1]}, PD, cache_aware (its default)",
        "vllm-router",
        _vllm_router(),
        extra=True,
    ),
    Gateway(
        f"sglang-router {SGLANG_ROUTER[1]}, PD, round robin",
        "sglang-router",
        _sglang_router(*_ROUND_ROBIN),
        yardstick=True,
    ),
    Gateway(
        f"sglang-router {SGLANG_ROUTER[1]}, PD, cache_aware (its default)",
        "sglang-router",
        _sglang_router(),
        extra=True,
    ),
    Gateway("omni proxy, PD", "omni", _omni),
)
FAMILIES: Final = ("floor", "nginx", "vllm-router", "sglang-router", "omni")
