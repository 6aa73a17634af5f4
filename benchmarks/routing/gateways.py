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
from omni_proxy.config import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One worker as gateways are told of it."""

    port: int
    role: str
    bootstrap_port: int | None
    events_port: int
    """Where it publishes KV events."""
    max_seqs: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway listens, which workers it has, where it may write, the folder of the model, and the limit."""

    port: int
    metrics_port: int
    workers: Sequence[WorkerAddress]
    folder: Path
    model: Path
    tpot_s: float
    """So long a token may take for an answer to count, in seconds of the gateway's clock."""

    def of(self, role: str) -> list[WorkerAddress]:
        """The workers of one role."""
        return [worker for worker in self.workers if worker.role == role]


@dataclass(frozen=True, slots=True)
class Gateway:
    """One row of the table. `name`: FAMILY, or FAMILY/POLICY."""

    name: str
    row: str
    command: Callable[[Place], list[str]]
    pd: bool = True
    whole: bool = False
    """Prompts may go to a decode worker whole: not every one passes a prefill worker."""
    renders: bool = False
    """It asks workers for the token ids of prompts, and needs them to answer."""

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]


def _nginx(place: Place) -> list[str]:
    """Least connections over all workers, each of which then does both."""
    ports = [worker.port for worker in place.workers]
    return nginx_command(place.folder, nginx_config(place.port, ports, place.folder, method="least_conn;"))


def _rust(family: str, prefill: str, decode: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        sources = [(worker.port, str(worker.bootstrap_port)) for worker in place.of("prefill")]
        targets = [worker.port for worker in place.of("decode")]
        found = rust_router(family, place.port, place.metrics_port, sources, targets, None)
        found += ["--prefill-policy", prefill, "--decode-policy", decode]
        return found + (_kv_events(place) if prefill == "kv_aware" else [])

    return command


def _kv_events(place: Place) -> list[str]:
    """Where vllm-router hears what prefill workers hold; token ids it asks of their render route."""
    found = []
    for worker in place.of("prefill"):
        found += ["--pd-kv-events", f"http://127.0.0.1:{worker.port}=tcp://127.0.0.1:{worker.events_port}"]
    return found


def _router(family: str, policy: str, decode: str | None = None) -> Gateway:
    """A Rust router with a policy for prefill, and for decode the same or another."""
    label = policy if decode is None else f"{policy}+{decode}"
    command = _rust(family, policy, decode or policy)
    return Gateway(f"{family}/{label}", f"{family} {label}", command, renders=policy == "kv_aware")


def omni_config(place: Place, limited: bool) -> str:
    """YAML of our own gateway. `limited`: it is told how long tokens may take, and that D may compute prompts."""
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
        "kv_cache_policy": "apc",
        "model": {"path": str(place.model)},
        "limits": {"queue_timeout_s": 600.0},
        "access_log": {"path": str(place.folder / "access.log")},
        "workers": workers,
    }
    if limited:
        config["scheduling"] = {"tpot_limit_s": place.tpot_s, "aggregate_below_tokens": None}
    return yaml.safe_dump(config, sort_keys=False)


def _omni(limited: bool) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        if importlib.util.find_spec("omni_proxy") is None:
            raise Missing("omni_proxy cannot be imported by this Python")
        config = place.folder / "omni.yaml"
        config.write_text(omni_config(place, limited))
        return [sys.executable, "-m", "omni_proxy", "serve", "-c", str(config), "--log-level", "warning"]

    return command


GATEWAYS: Final = (
    Gateway("omni", "omni-proxy", _omni(limited=False)),
    Gateway("omni/limit", "omni-proxy, TPOT limit", _omni(limited=True), whole=True),
    _router("vllm-router", "kv_aware"),
    _router("vllm-router", "cache_aware"),
    _router("vllm-router", "cache_aware", "power_of_two"),
    _router("vllm-router", "consistent_hash", "power_of_two"),
    _router("vllm-router", "sticky_least_loaded"),
    _router("vllm-router", "power_of_two"),
    _router("vllm-router", "round_robin"),
    _router("sglang-router", "cache_aware"),
    _router("sglang-router", "cache_aware", "power_of_two"),
    _router("sglang-router", "bucket", "power_of_two"),
    _router("sglang-router", "power_of_two"),
    _router("sglang-router", "round_robin"),
    Gateway("nginx", "nginx least_conn, no PD", _nginx, pd=False),
)
"""Pairs of policies are those that the routers' own help and documentation show for PD."""
FAMILIES: Final = tuple(dict.fromkeys(gateway.family for gateway in GATEWAYS))


def chosen(text: str) -> list[Gateway]:
    """The gateways that a list of families and FAMILY/POLICY names, in the table's order. Raises ConfigError."""
    wanted = text.split(",")
    known = {*FAMILIES, *(gateway.name for gateway in GATEWAYS)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        names = ", ".join(gateway.name for gateway in GATEWAYS)
        raise ConfigError(f"--gateways: there is no {unknown[0]!r}; known are {names}, or a family as a whole")
    return [gateway for gateway in GATEWAYS if gateway.name in wanted or gateway.family in wanted]
