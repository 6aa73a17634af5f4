"""How engines are started: the command and environment of one worker, and its entry in the gateway's config.

Pure. Knows flags of engines and nothing of machines, files or processes. Flags are those of docs/engines.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from string import Formatter
from typing import Final

from omni_proxy.config import ConnectorName
from omni_proxy.messages import Role


class Engine(StrEnum):
    """Whose server a worker is."""

    EMBEDDED = "embedded"
    VLLM = "vllm"
    VLLM_ASCEND = "vllm-ascend"
    SGLANG = "sglang"


CONNECTORS: Final[Mapping[Engine, tuple[ConnectorName, ...]]] = {
    Engine.EMBEDDED: (ConnectorName.OMNI,),
    Engine.VLLM: (
        ConnectorName.VLLM_NIXL,
        ConnectorName.VLLM_MOONCAKE,
        ConnectorName.VLLM_P2P_NCCL,
        ConnectorName.LMCACHE,
    ),
    Engine.VLLM_ASCEND: (ConnectorName.ASCEND_MOONCAKE, ConnectorName.ASCEND_LAYERWISE),
    Engine.SGLANG: (ConnectorName.SGLANG,),
}
"""What each engine speaks between P and D; the first is taken where none is named."""

PLACES: Final = ("name", "role", "model", "host", "address", "port", "kv_port")
"""What is filled into a template."""

_KV_CONNECTORS: Final[Mapping[ConnectorName, str]] = {
    ConnectorName.VLLM_NIXL: "NixlConnector",
    ConnectorName.VLLM_MOONCAKE: "MooncakeConnector",
    ConnectorName.VLLM_P2P_NCCL: "P2pNcclConnector",
    ConnectorName.LMCACHE: "LMCacheConnectorV1",
    ConnectorName.ASCEND_MOONCAKE: "MooncakeConnectorV1",
    ConnectorName.ASCEND_LAYERWISE: "MooncakeLayerwiseConnector",
}
_KV_ROLES: Final[Mapping[Role, str]] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.MIXED: "kv_both"}
_LISTENS_FOR_KV: Final = frozenset({ConnectorName.VLLM_MOONCAKE, ConnectorName.SGLANG, ConnectorName.OMNI})
"""Where decode workers meet a prefill worker at its `bootstrap_port`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Over how many devices a worker's model is spread: tensor-parallel ranks, times data-parallel ones."""

    tp: int = 1
    dp: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One worker that is to be started. `kv_port` is the first of those that its connector listens on."""

    name: str
    index: int
    """Among all workers of the deployment: engine ids are made of it."""
    role: Role
    engine: Engine
    connector: ConnectorName
    model: str | None
    """A folder or a name; None: the demo model of the embedded engine."""
    served_name: str | None
    listen: str
    address: str
    """By which the gateway and its partners reach it."""
    port: int
    kv_port: int
    shape: Shape = Shape()
    prefill_shape: Shape = Shape()
    decode_shape: Shape = Shape()
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    template: tuple[str, ...] = ()
    """A command of the user's own, with places such as {port} (see `filled`); empty: ours."""


def kv_ports(engine: Engine, shape: Shape) -> int:
    """How many ports from `kv_port` on a worker may take: one for each rank where ranks listen on their own."""
    return shape.tp * shape.dp if engine in (Engine.VLLM, Engine.VLLM_ASCEND) else 1


def command(launch: Launch) -> tuple[str, ...]:
    """What starts the worker, as arguments. Raises ValueError for a template that is none."""
    if launch.template:
        return tuple(filled(part, launch) for part in launch.template) + launch.flags
    return _COMMANDS[launch.engine](launch) + launch.flags


def filled(part: str, launch: Launch) -> str:
    """An argument of a template with its places filled in; only plain names are places. Raises ValueError."""
    for _, place, spec, conversion in Formatter().parse(part):
        if place is not None and (place not in PLACES or spec or conversion):
            raise ValueError(f"there is no {place!r}")
    return part.format(
        name=launch.name,
        role=launch.role.value,
        model=launch.model or "",
        host=launch.listen,
        address=launch.address,
        port=launch.port,
        kv_port=launch.kv_port,
    )


def environment(launch: Launch) -> dict[str, str]:
    """What the connector wants to find in the worker's environment; the recipe's own go before it."""
    made: dict[str, str] = {}
    match launch.connector:
        case ConnectorName.VLLM_NIXL:
            made["VLLM_NIXL_SIDE_CHANNEL_HOST"] = launch.address
            made["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(launch.kv_port)
        case ConnectorName.VLLM_MOONCAKE:
            made["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(launch.kv_port)
        case ConnectorName.VLLM_P2P_NCCL:
            made["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
        case ConnectorName.ASCEND_MOONCAKE | ConnectorName.ASCEND_LAYERWISE:
            made["VLLM_HOST_IP"] = launch.address
        case _:
            pass
    return {**made, **launch.env}


def worker_entry(launch: Launch) -> dict[str, object]:
    """The worker as the gateway's config names it."""
    entry: dict[str, object] = {
        "name": launch.name,
        "url": f"http://{_in_url(launch.address)}:{launch.port}",
        "role": launch.role.value,
        "connector": launch.connector.value,
    }
    if launch.shape.dp > 1:
        entry["dp_size"] = launch.shape.dp
    if launch.role is Role.PREFILL and launch.connector in _LISTENS_FOR_KV:
        entry["bootstrap_port"] = launch.kv_port
    if launch.connector is ConnectorName.VLLM_P2P_NCCL:
        entry["kv_address"] = f"{_in_url(launch.address)}:{launch.kv_port}"
    return entry


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _vllm(launch: Launch) -> tuple[str, ...]:
    assert launch.model is not None
    line = ["vllm", "serve", launch.model, "--host", launch.listen, "--port", str(launch.port)]
    line += _named("--served-model-name", launch.served_name)
    line += _spread("--tensor-parallel-size", launch.shape.tp) + _spread("--data-parallel-size", launch.shape.dp)
    line.append("--enable-prompt-tokens-details")
    if launch.connector in _KV_CONNECTORS:
        line += ["--kv-transfer-config", json.dumps(_kv_config(launch), separators=(",", ":"))]
    return tuple(line)


def _kv_config(launch: Launch) -> dict[str, object]:
    connector, role = launch.connector, _KV_ROLES[launch.role]
    config: dict[str, object] = {"kv_connector": _KV_CONNECTORS[connector], "kv_role": role}
    match connector:
        case ConnectorName.LMCACHE:
            config["kv_role"] = "kv_both"
        case ConnectorName.VLLM_P2P_NCCL:
            config["kv_port"] = str(launch.kv_port)
            config["kv_connector_extra_config"] = {"http_port": str(launch.port)}
        case ConnectorName.ASCEND_MOONCAKE | ConnectorName.ASCEND_LAYERWISE:
            config["kv_port"] = str(launch.kv_port)
            config["engine_id"] = str(launch.index)
            config["kv_connector_extra_config"] = {
                leg: {"dp_size": shape.dp, "tp_size": shape.tp}
                for leg, shape in (("prefill", launch.prefill_shape), ("decode", launch.decode_shape))
            }
        case _:
            pass
    return config


def _sglang(launch: Launch) -> tuple[str, ...]:
    assert launch.model is not None
    line = ["python", "-m", "sglang.launch_server", "--model-path", launch.model]
    line += ["--host", launch.listen, "--port", str(launch.port)]
    line += _named("--served-model-name", launch.served_name)
    # SGLang counts all ranks as tensor-parallel, and divides them into data-parallel ones.
    line += _spread("--tp-size", launch.shape.tp * launch.shape.dp) + _spread("--dp-size", launch.shape.dp)
    if launch.shape.dp > 1:
        line.append("--enable-dp-attention")
    if launch.role is not Role.MIXED:
        line += ["--disaggregation-mode", launch.role.value]
    if launch.role is Role.PREFILL:
        line += ["--disaggregation-bootstrap-port", str(launch.kv_port)]
    return tuple(line)


def _embedded(launch: Launch) -> tuple[str, ...]:
    line = ["omni-proxy", "worker", "--role", launch.role.value, "--host", launch.listen, "--port", str(launch.port)]
    line += ["--side-channel-port", str(launch.kv_port)]
    line += _named("--model", launch.model) + _named("--served-model-name", launch.served_name)
    return tuple(line)


def _named(flag: str, value: str | None) -> list[str]:
    return [] if value is None else [flag, value]


def _spread(flag: str, ranks: int) -> list[str]:
    return [] if ranks == 1 else [flag, str(ranks)]


_COMMANDS: Final[Mapping[Engine, Callable[[Launch], tuple[str, ...]]]] = {
    Engine.EMBEDDED: _embedded,
    Engine.VLLM: _vllm,
    Engine.VLLM_ASCEND: _vllm,
    Engine.SGLANG: _sglang,
}
