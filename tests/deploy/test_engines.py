"""The command lines of docs/engines.md, and what the gateway is told of those who were started with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_proxy.config import ConnectorName, Worker
from omni_proxy.deploy.engines import CONNECTORS, Engine, Launch, Shape, command, environment, kv_ports, worker_entry
from omni_proxy.messages import Role
from omni_proxy.workers.connectors.registry import CONNECTORS as REGISTRY


def launch(engine: Engine, connector: ConnectorName, role: Role = Role.PREFILL, **changes: Any) -> Launch:
    common = {
        "model": "m",
        "served_name": "s",
        "listen": "0.0.0.0",
        "address": "10.0.0.1",
        "port": 8100,
        "kv_port": 5600,
    }
    return Launch(f"{role.value}-0", 3, role, engine, connector, **{**common, **changes})


def kv_config(line: tuple[str, ...]) -> Any:
    return json.loads(line[line.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize(
    ("engine", "connector"), [(engine, name) for engine, names in CONNECTORS.items() for name in names]
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_every_pair_makes_a_worker_that_the_config_takes(engine: Engine, connector: ConnectorName, role: Role) -> None:
    made = launch(engine, connector, role, shape=Shape(2, 4))
    worker = Worker.model_validate(worker_entry(made))
    assert (worker.role, worker.connector, worker.dp_size) == (role, connector, 4)
    assert connector in REGISTRY
    line = command(made)
    assert "8100" in line
    assert all(isinstance(word, str) and word for word in line)


def test_nixl() -> None:
    made = launch(Engine.VLLM, ConnectorName.VLLM_NIXL, Role.DECODE)
    assert command(made)[:7] == ("vllm", "serve", "m", "--host", "0.0.0.0", "--port", "8100")
    assert kv_config(command(made)) == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert environment(made) == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }


def test_mooncake_meets_at_its_bootstrap_port() -> None:
    made = launch(Engine.VLLM, ConnectorName.VLLM_MOONCAKE)
    assert environment(made)["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "5600"
    assert worker_entry(made)["bootstrap_port"] == 5600
    assert "bootstrap_port" not in worker_entry(launch(Engine.VLLM, ConnectorName.VLLM_MOONCAKE, Role.DECODE))


def test_p2p_nccl_says_its_kv_address() -> None:
    made = launch(Engine.VLLM, ConnectorName.VLLM_P2P_NCCL, address="fd00::1")
    assert worker_entry(made)["kv_address"] == "[fd00::1]:5600"
    assert worker_entry(made)["url"] == "http://[fd00::1]:8100"
    assert kv_config(command(made))["kv_connector_extra_config"] == {"http_port": "8100"}
    assert environment(made)["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] == "1"


def test_ascend_knows_both_sides_shapes_and_its_own_engine_id() -> None:
    made = launch(
        Engine.VLLM_ASCEND, ConnectorName.ASCEND_MOONCAKE, prefill_shape=Shape(8, 2), decode_shape=Shape(1, 16)
    )
    assert kv_config(command(made)) == {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_port": "5600",
        "engine_id": "3",
        "kv_connector_extra_config": {
            "prefill": {"dp_size": 2, "tp_size": 8},
            "decode": {"dp_size": 16, "tp_size": 1},
        },
    }


def test_sglang_counts_all_ranks_as_tensor_parallel() -> None:
    line = command(launch(Engine.SGLANG, ConnectorName.SGLANG, shape=Shape(2, 4)))
    assert line[line.index("--tp-size") + 1] == "8"
    assert line[line.index("--dp-size") + 1] == "4"
    assert line[line.index("--disaggregation-bootstrap-port") + 1] == "5600"
    decode = command(launch(Engine.SGLANG, ConnectorName.SGLANG, Role.DECODE))
    assert decode[decode.index("--disaggregation-mode") + 1] == "decode"
    assert "--disaggregation-bootstrap-port" not in decode


def test_mixed_workers_hand_nothing_over() -> None:
    assert "--kv-transfer-config" not in command(launch(Engine.VLLM, ConnectorName.AGGREGATED, Role.MIXED))
    assert "--disaggregation-mode" not in command(launch(Engine.SGLANG, ConnectorName.AGGREGATED, Role.MIXED))


def test_a_template_stands_for_the_whole_line_before_the_flags() -> None:
    made = launch(
        Engine.VLLM,
        ConnectorName.VLLM_NIXL,
        template=("serve-{role}", "--at={host}:{port}", "{{}}", "{model}"),
        flags=("--more",),
        env={"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"},
    )
    assert command(made) == ("serve-prefill", "--at=0.0.0.0:8100", "{}", "m", "--more")
    assert environment(made)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1", "the user's own goes before ours"


def test_ranks_of_vllm_listen_each_for_themselves() -> None:
    assert kv_ports(Engine.VLLM, Shape(2, 4)) == 8
    assert kv_ports(Engine.SGLANG, Shape(2, 4)) == 1
