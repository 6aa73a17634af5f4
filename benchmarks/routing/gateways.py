"""The gateways that are compared, each at its documented settings: policy by policy, PD mode where there is one.

Peers keep their defaults besides the policy and the addresses. Omni Proxy gets what its documentation tells an operator
to set: the model's folder for its tokenizer, and the limits of the workers.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from benchmarks.relay.build import Missing, find_program, peer_program
from benchmarks.relay.gateways import SGLANG_ROUTER, VLLM_ROUTER


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One worker as gateways are told of it."""

    port: int
    role: str
    bootstrap_port: int | None
    max_seqs: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway listens, which workers it has, where it may write, and the folder of the model."""

    port: int
    metrics_port: int
    workers: Sequence[WorkerAddress]
    folder: Path
    model: Path

    def of(self, role: str) -> list[WorkerAddress]:
        """The workers of one role."""
        return [worker for worker in self.workers if worker.role == role]


@dataclass(frozen=True, slots=True)
class Gateway:
    """One row of the table."""

    row: str
    family: str
    command: Callable[[Place], list[str]]
    pd: bool = True


def nginx_config(place: Place) -> str:
    """Least connections over all workers, each of which then does both; with the settings that streams need."""
    servers = " ".join(f"server 127.0.0.1:{worker.port};" for worker in place.workers)
    temp = "".join(
        f"{kind}_temp_path {place.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off; worker_processes 1; pid {place.folder}/pid;
error_log {place.folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log {place.folder}/access.log; {temp}
  client_max_body_size 64m; client_body_buffer_size 1m;
  upstream workers {{ least_conn; {servers} keepalive 512; }}
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


def _rust_router(place: Place, policy: str, bootstrap: bool) -> list[str]:
    args = ["--host", "127.0.0.1", "--port", str(place.port)]
    args += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
    for worker in place.of("prefill"):
        args += ["--prefill", f"http://127.0.0.1:{worker.port}"]
        if bootstrap:
            args.append(str(worker.bootstrap_port))
    for worker in place.of("decode"):
        args += ["--decode", f"http://127.0.0.1:{worker.port}"]
    return [*args, "--policy", policy]


def _vllm_router(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [peer_program(*VLLM_ROUTER), "--vllm-pd-disaggregation", *_rust_router(place, policy, False)]

    return command


def _sglang_router(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [peer_program(*SGLANG_ROUTER), "launch", "--pd-disaggregation", *_rust_router(place, policy, True)]

    return command


def omni_config(place: Place, policy: str) -> str:
    """YAML of our own gateway. `policy`: apc or independent."""
    workers = [
        {
            "name": f"{worker.role}-{worker.port}",
            "url": f"http://127.0.0.1:{worker.port}",
            "role": worker.role,
            "connector": "omni",
            "max_seqs": worker.max_seqs,
            "max_batch_tokens": worker.max_batch_tokens,
        }
        for worker in place.workers
    ]
    config: dict[str, object] = {
        "listen": {"host": "127.0.0.1", "port": place.port},
        "kv_cache_policy": policy,
        "model": {"path": str(place.model)},
        "limits": {"queue_timeout_s": 600.0},
        "access_log": {"path": str(place.folder / "access.log")},
        "workers": workers,
    }
    return yaml.safe_dump(config, sort_keys=False)


def _omni(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        if importlib.util.find_spec("omni_proxy") is None:
            raise Missing("omni_proxy cannot be imported by this Python")
        config = place.folder / "omni.yaml"
        config.write_text(omni_config(place, policy))
        return [sys.executable, "-m", "omni_proxy", "serve", "-c", str(config), "--log-level", "warning"]

    return command


GATEWAYS: Final = (
    Gateway("omni-proxy", "omni", _omni("apc")),
    Gateway("vllm-router cache_aware", "vllm-router", _vllm_router("cache_aware")),
    Gateway("vllm-router consistent_hash", "vllm-router", _vllm_router("consistent_hash")),
    Gateway("vllm-router power_of_two", "vllm-router", _vllm_router("power_of_two")),
    Gateway("vllm-router round_robin", "vllm-router", _vllm_router("round_robin")),
    Gateway("sglang-router cache_aware", "sglang-router", _sglang_router("cache_aware")),
    Gateway("sglang-router power_of_two", "sglang-router", _sglang_router("power_of_two")),
    Gateway("sglang-router round_robin", "sglang-router", _sglang_router("round_robin")),
    Gateway("nginx least_conn, no PD", "nginx", _nginx, pd=False),
)
FAMILIES: Final = tuple(dict.fromkeys(gateway.family for gateway in GATEWAYS))
