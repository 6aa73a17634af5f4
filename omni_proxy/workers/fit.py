"""Does a worker fit: its connector to the engine, and the two sides of a handoff to each other? Pure.

Only what was said can speak against somebody: engines tell little of themselves, and not all of them the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from omni_proxy.config import ConnectorName, Worker
from omni_proxy.messages import Mode, Role
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.facts import Facts

ENGINES: Final[Mapping[str, frozenset[str]]] = {
    "vllm-nixl": frozenset({"vllm", "omni"}),
    "vllm-mooncake": frozenset({"vllm"}),
    "vllm-p2p-nccl": frozenset({"vllm"}),
    "ascend-mooncake": frozenset({"vllm"}),
    "ascend-layerwise": frozenset({"vllm"}),
    "omni-llmdatadist": frozenset({"vllm"}),
    "omni": frozenset({"omni"}),
    "sglang": frozenset({"sglang", "omni"}),
    "lmcache": frozenset({"vllm", "sglang"}),
}
"""Who can speak a protocol; `aggregated` asks for nothing."""


class Unfit(Exception):
    """A worker that cannot be used as it is configured; the text says why."""


def connector_of(worker: Worker, facts: Facts) -> str:
    """The connector for a worker: the one of its config, else what it speaks. Raises Unfit."""
    wanted = worker.connector
    if worker.role is Role.ENCODE:  # it hands no KV over, whatever it could
        named = wanted is not None and wanted is not ConnectorName.AUTO
        return wanted.value if named and wanted is not None else ConnectorName.AGGREGATED.value
    if wanted is None or wanted is ConnectorName.AUTO:
        found = _detected(worker, facts)
        _check_role(worker, facts)
        return found
    if not worker.checks:
        return wanted.value
    able = ENGINES.get(wanted.value)
    if able is not None and facts.engine and facts.engine not in able:
        raise Unfit(f"{_name(facts)} does not speak {wanted.value}")
    # The embedded engine speaks several.
    if able is not None and facts.connector not in ("", wanted.value) and facts.engine != "omni":
        raise Unfit(f"it speaks {facts.connector}, not {wanted.value}")
    _check_role(worker, facts)
    return wanted.value


def _detected(worker: Worker, facts: Facts) -> str:
    if facts.connector:
        if facts.connector == ConnectorName.AGGREGATED and worker.role is not Role.MIXED:
            raise Unfit(f"{_name(facts)} hands no KV over: it can be of role mixed only, not {worker.role.value}")
        return facts.connector
    if worker.role is Role.MIXED:
        return ConnectorName.AGGREGATED.value
    if worker.connector is None and facts.engine in ("", "vllm"):
        return ConnectorName.VLLM_NIXL.value  # what most have; a P that speaks something else hands nothing over
    raise Unfit(f"{_name(facts)} does not say how it hands KV over: name its connector in the config")


def _check_role(worker: Worker, facts: Facts) -> None:
    if worker.checks and facts.role is not None and worker.role is not facts.role:
        raise Unfit(f"it was started for {facts.role.value}, its role here is {worker.role.value}")


def apart(one: Facts, other: Facts) -> str | None:
    """Why a P and a D cannot exchange KV, from the side of `one`; None where nothing speaks against it."""
    for what, mine, theirs in (
        ("block size", one.block_tokens, other.block_tokens),
        ("dtype", one.dtype, other.dtype),
        ("model", _base(one.model), _base(other.model)),
    ):
        if mine and theirs and mine != theirs:
            return f"{what} {mine}, not {theirs}"
    mine, theirs = one.tp_size, other.tp_size
    if mine and theirs and mine % theirs and theirs % mine:
        return f"tensor parallel size {mine}, which does not go with {theirs}"
    return None


def missing_of(worker: Worker, connector: str, facts: Facts, callbacks: bool) -> str | None:
    """What a connector needs of a worker and does not have; None where nothing is missing."""
    if worker.role is Role.MIXED and Mode.AGGREGATED not in CONNECTORS[connector].modes:
        return f"no worker does both legs with {connector}: its role can be prefill or decode"
    if connector == ConnectorName.VLLM_P2P_NCCL and not worker.kv_address:
        return "the address of its KV connector is not known: set 'kv_address', or let it announce itself"
    if connector == ConnectorName.VLLM_MOONCAKE and worker.role is Role.PREFILL and not facts.engine_ids:
        return "its bootstrap server does not say its engine id (GET /query on 'bootstrap_port')"
    if connector == ConnectorName.ASCEND_LAYERWISE and not callbacks:
        return "it asks the gateway for its prefills: set 'callbacks'"
    return None


def _base(model: str) -> str:
    """The model's own name: the same weights may lie in different folders."""
    return PurePosixPath(model).name


def _name(facts: Facts) -> str:
    return f"{facts.engine} {facts.version}".strip() if facts.engine else "the engine"
