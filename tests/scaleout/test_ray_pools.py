"""The pools file and the plan made of it; no Ray is needed for these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_proxy.cli import main
from omni_proxy.config import ConfigError, read_yaml, validated
from omni_proxy.ray.pools import Plan, RayPools, check_address, planned


def pools(**data: Any) -> RayPools:
    return validated(RayPools, data, "p")


def test_a_plan_names_its_workers_and_survives_the_wire() -> None:
    wanted = planned(pools(prefill={"count": 2, "flags": ["--a"]}, decode={"worker": {"max_seqs": 9}}))
    assert [worker.launch.name for worker in wanted] == ["prefill-0", "prefill-1", "decode-0"]
    assert [worker.launch.index for worker in wanted] == [0, 1, 2]
    plan = Plan("auto", "n", "SPREAD", 1.0, 60.0, wanted)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert wanted[2].entry == {"max_seqs": 9}


@pytest.mark.parametrize(
    ("data", "bundle"),
    [
        ({}, {"CPU": 1.0}),
        ({"engine": "vllm", "model": "m", "prefill": {"tensor_parallel": 4}}, {"CPU": 1.0, "GPU": 4.0}),
        ({"engine": "vllm", "model": "m", "prefill": {"gpus": 0.5, "cpus": 8}}, {"CPU": 8.0, "GPU": 0.5}),
        ({"engine": "vllm", "model": "m", "prefill": {"resources": {"TPU": 4}}}, {"CPU": 1.0, "TPU": 4.0}),
        (
            {"engine": "vllm-ascend", "model": "m", "prefill": {"tensor_parallel": 8, "data_parallel": 2}},
            {"CPU": 1.0, "NPU": 16.0},
        ),
        ({"prefill": {"accelerator": "H100"}}, {"CPU": 1.0, "accelerator_type:H100": 0.001}),
        ({"prefill": {"cpus": 0}}, {"memory": 1.0}),
    ],
)
def test_what_a_worker_takes_of_its_node(data: dict[str, Any], bundle: dict[str, float]) -> None:
    assert planned(pools(**data))[0].bundle == bundle


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (
            {"strategy": "WIDE"},
            "p: strategy: Input should be 'SPREAD', 'PACK', 'STRICT_SPREAD' or 'STRICT_PACK' (got 'WIDE')",
        ),
        ({"prefill": {"count": 0}}, "p: prefill.count: Input should be greater than or equal to 1 (got 0)"),
        ({"prefill": {"gpus": -1}}, "p: prefill.gpus: Input should be greater than or equal to 0 (got -1)"),
        (
            {"prefill": {"resources": {"GPU": 1}}},
            "p: prefill: resources.GPU: has a field of its own, or none (got 1.0)",
        ),
        ({"engine": "sglang"}, "p: model: is required for the engine sglang (got None)"),
        (
            {"engine": "sglang", "model": "m", "connector": "omni"},
            "p: connector: the engine sglang has sglang (got 'omni')",
        ),
        ({"wait_s": 0}, "p: wait_s: Input should be greater than 0 (got 0)"),
        ({"nodes": 3}, "p: nodes: Extra inputs are not permitted (got 3)"),
    ],
)
def test_bad_pools_are_refused_by_field_and_value(data: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pools(**data)
    assert str(caught.value) == fault


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "head", "head:", "head:0", "head:99999", "head:x"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--ray: must be auto, local or HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--ray-pools", "x"], "--ray-pools: needs --ray ADDRESS"),
        (["--ray", "auto", "--ray-pools", "/none/such"], "/none/such: No such file or directory"),
        (["--ray", "auto", "--expert-parallel", "2"], "--expert-parallel: belongs into the flags of the pools file"),
        (["--ray", "nowhere"], "--ray: must be auto, local or HOST:PORT (got 'nowhere')"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *arguments]) == 2
    assert fault in capsys.readouterr().err


def test_the_shipped_pools_are_good() -> None:
    for path in sorted((Path(__file__).parents[2] / "configs" / "ray").glob("*.yaml")):
        assert validated(RayPools, read_yaml(path), path.name)
