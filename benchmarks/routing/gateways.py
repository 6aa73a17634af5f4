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

from benchmarks.relay.build import Missing
from benchmarks.relay.gateways import nginx_command, nginx_config, rust_router


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


def _nginx(place: Place) -> list[str]:
    """Least connections over all workers, each of which then does both."""
    ports = [worker.port for worker in place.workers]
    return nginx_command(place.folder, nginx_config(place.port, ports, place.folder, method="least_conn;"))


def _rust(name: str, policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        prefill = [(worker.port, str(worker.bootstrap_port)) for worker in place.of("prefill")]
        decode = [worker.port for worker in place.of("decode")]
        return rust_router(name, place.port, place.metrics_port, prefill, decode, policy)

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
    Gateway("vllm-router cache_aware", "vllm-router", _rust("vllm-router", "cache_aware")),
    Gateway("vllm-router consistent_hash", "vllm-router", _rust("vllm-router", "consistent_hash")),
    Gateway("vllm-router power_of_two", "vllm-router", _rust("vllm-router", "power_of_two")),
    Gateway("vllm-router round_robin", "vllm-router", _rust("vllm-router", "round_robin")),
    Gateway("sglang-router cache_aware", "sglang-router", _rust("sglang-router", "cache_aware")),
    Gateway("sglang-router power_of_two", "sglang-router", _rust("sglang-router", "power_of_two")),
    Gateway("sglang-router round_robin", "sglang-router", _rust("sglang-router", "round_robin")),
    Gateway("nginx least_conn, no PD", "nginx", _nginx, pd=False),
)
FAMILIES: Final = tuple(dict.fromkeys(gateway.family for gateway in GATEWAYS))
