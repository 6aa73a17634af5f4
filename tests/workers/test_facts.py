"""What engines say of themselves: real shapes of their answers, and whatever else may come."""

from __future__ import annotations

import json

import pytest

from omni_proxy.config import Worker
from omni_proxy.messages import Role
from omni_proxy.workers.facts import (
    Facts,
    joined,
    of_bootstrap,
    of_metrics,
    of_models,
    of_other,
    of_sglang_server_info,
    of_version,
    of_vllm_server_info,
)
from omni_proxy.workers.fit import Unfit, apart, connector_of, missing_of

VLLM_METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="128",cache_dtype="fp8",engine="0",num_gpu_blocks="341"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="fp8",engine="1",num_gpu_blocks="341"} 1.0
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0
"""
SGLANG = {
    "model_path": "/models/Qwen3-0.6B",
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8997,
    "page_size": 16,
    "dtype": "auto",
    "kv_cache_dtype": "fp8_e5m2",
    "tp_size": 2,
    "dp_size": 4,
    "context_length": 4096,
    "max_total_num_tokens": 16384,
    "version": "0.5.23",
}


def worker(**more: object) -> Worker:
    return Worker.model_validate({"name": "p0", "url": "http://h:1", "role": "prefill", **more})


def test_models_say_who_serves() -> None:
    assert of_models([{"id": "m", "owned_by": "vllm", "root": "/models/Qwen3"}]) == Facts(
        engine="vllm", model="/models/Qwen3"
    )
    assert of_models([{"id": "m", "owned_by": "omni-proxy"}]).connector == "omni"
    assert of_models([{"id": "m", "owned_by": ["odd"]}, {}]) == of_models([]) == Facts()


def test_metrics_of_vllm() -> None:
    facts = of_metrics(VLLM_METRICS)
    assert (facts.block_tokens, facts.kv_capacity_tokens, facts.dp_size) == (128, 128 * 341, 2)
    assert (facts.connector, facts.dtype) == ("vllm-nixl", "fp8")
    odd = of_metrics('vllm:cache_config_info{block_size="None",num_gpu_blocks="-1",cache_dtype="auto"} 1\n')
    assert (odd.block_tokens, odd.kv_capacity_tokens, odd.dtype, odd.connector) == (None, None, "", "")
    assert of_metrics("") == Facts()


@pytest.mark.parametrize("blocks", ["nan", "NaN", "inf", "1e9", "-5", "0", "0.5", "9" * 20])
def test_a_capacity_that_is_no_count_is_not_known(blocks: str) -> None:
    said = of_metrics(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n')
    assert (said.block_tokens, said.kv_capacity_tokens) == (16, None)
    sglang = of_sglang_server_info(b'{"page_size":16,"max_total_num_tokens":1e400}')
    assert sglang is None or sglang.kv_capacity_tokens is None


@pytest.mark.parametrize(
    "text",
    [
        "{\"vllm_config\": \"KVTransferConfig(kv_connector='MooncakeLayerwiseConnector', kv_role='kv_consumer') "
        'tensor_parallel_size=4, dtype=torch.bfloat16"}',
        '{"vllm_config": {"kv_transfer_config": {"kv_connector": "MooncakeLayerwiseConnector", '
        '"kv_role": "kv_consumer"}, '
        '"parallel_config": {"tensor_parallel_size": 4}, "model_config": {"dtype": "torch.bfloat16"}}}',
    ],
)
def test_server_info_of_vllm_as_text_and_as_json(text: str) -> None:
    facts = of_vllm_server_info(text.encode())
    assert (facts.connector, facts.role) == ("ascend-layerwise", Role.DECODE)
    assert (facts.tp_size, facts.dtype) == (4, "bfloat16")


def test_server_info_of_somebody_else() -> None:
    assert of_vllm_server_info(b'{"detail":"Not Found","kv_connector":"x"}') == Facts()


def test_server_info_of_sglang() -> None:
    facts = of_sglang_server_info(json.dumps(SGLANG).encode())
    assert facts is not None
    assert (facts.connector, facts.role, facts.bootstrap_port) == ("sglang", Role.PREFILL, 8997)
    assert (facts.block_tokens, facts.dtype, facts.tp_size, facts.dp_size) == (16, "fp8_e5m2", 2, 4)
    whole = of_sglang_server_info(json.dumps(SGLANG | {"disaggregation_mode": "null"}).encode())
    assert whole is not None
    assert (whole.connector, whole.role, whole.bootstrap_port) == ("aggregated", None, None)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a":1}', b"\xff", b"[" * 5000])
def test_what_is_not_understood_is_not_known(body: bytes) -> None:
    assert of_sglang_server_info(body) is None
    assert of_version(body) == of_other("/info", body) == of_other("/props", body) == Facts()
    assert of_bootstrap(body) == {}


def test_others() -> None:
    assert of_other("/props", b'{"default_generation_settings":{},"build_info":"b1"}').engine == "llama.cpp"
    tgi = of_other("/info", b'{"model_id":"m","docker_label":"x","version":"3","max_total_tokens":4096}')
    assert (tgi.engine, tgi.version, tgi.max_model_len) == ("tgi", "3", 4096)
    assert of_version(b'{"version":"0.32.0"}').version == "0.32.0"


def test_engine_ids_in_both_shapes() -> None:
    assert of_bootstrap(b'{"0":{"engine_id":"P0"},"1":{"engine_id":"P1"},"x":{"engine_id":"?"}}') == {0: "P0", 1: "P1"}
    assert of_bootstrap(b'{"P0":{"0":{"0":"addr"},"1":{}}}') == {0: "P0", 1: "P0"}
    assert of_bootstrap(b'{"P0":3}') == {}


def test_the_first_that_says_something_counts() -> None:
    assert joined(Facts(), Facts(engine="vllm", tp_size=2), Facts(engine="sglang", dp_size=3)) == Facts(
        engine="vllm", tp_size=2, dp_size=3
    )


# -------------------------------------------------------------------------------- what fits


VLLM = Facts(engine="vllm", version="0.32.0")


@pytest.mark.parametrize(
    ("config", "facts", "found"),
    [
        ({}, Facts(), "vllm-nixl"),
        ({}, VLLM, "vllm-nixl"),
        ({}, Facts(engine="sglang", connector="sglang"), "sglang"),
        ({"connector": "auto"}, Facts(engine="vllm", connector="vllm-mooncake"), "vllm-mooncake"),
        ({"role": "mixed"}, Facts(), "aggregated"),
        ({"role": "mixed", "connector": "auto"}, VLLM, "aggregated"),
        ({"connector": "vllm-nixl"}, Facts(engine="omni", connector="omni"), "vllm-nixl"),
        ({"connector": "vllm-nixl"}, Facts(), "vllm-nixl"),
        ({"connector": "sglang", "checks": False}, VLLM, "sglang"),
        ({"role": "encode"}, Facts(engine="tgi", connector="aggregated"), "aggregated"),
        ({"role": "encode", "connector": "auto"}, Facts(engine="sglang", role=Role.DECODE), "aggregated"),
        ({"role": "encode", "connector": "vllm-nixl"}, Facts(), "vllm-nixl"),
        ({"connector": "aggregated", "role": "mixed"}, Facts(engine="sglang", connector="sglang"), "aggregated"),
    ],
)
def test_the_connector(config: dict[str, object], facts: Facts, found: str) -> None:
    assert connector_of(worker(**config), facts) == found


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        ({"connector": "auto"}, VLLM, "vllm 0.32.0 does not say how it hands KV over"),
        ({"connector": "auto"}, Facts(), "the engine does not say how it hands KV over"),
        (
            {},
            Facts(engine="tgi", connector="aggregated"),
            "tgi hands no KV over: it can be of role mixed only, not prefill",
        ),
        ({"connector": "sglang"}, VLLM, "vllm 0.32.0 does not speak sglang"),
        ({"connector": "vllm-nixl"}, Facts(engine="vllm", connector="lmcache"), "it speaks lmcache, not vllm-nixl"),
        ({"connector": "omni"}, VLLM, "does not speak omni"),
        (
            {"connector": "vllm-nixl"},
            Facts(engine="vllm", connector="vllm-nixl", role=Role.DECODE),
            "it was started for decode, its role here is prefill",
        ),
        ({}, Facts(engine="sglang", connector="sglang", role=Role.DECODE), "it was started for decode"),
    ],
)
def test_what_does_not_fit(config: dict[str, object], facts: Facts, reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        connector_of(worker(**config), facts)


def test_what_keeps_two_apart() -> None:
    p = Facts(block_tokens=16, dtype="bfloat16", tp_size=2, model="/models/Qwen3-8B")
    assert apart(p, p) is None
    assert apart(p, Facts()) is None
    assert apart(p, Facts(model="Qwen/Qwen3-8B", tp_size=4)) is None
    for other, reason in (
        (Facts(block_tokens=128), "block size 16, not 128"),
        (Facts(dtype="fp8"), "dtype bfloat16, not fp8"),
        (Facts(model="Qwen/Qwen3-0.6B"), "model Qwen3-8B, not Qwen3-0.6B"),
        (Facts(tp_size=3), "tensor parallel size 2, which does not go with 3"),
    ):
        assert apart(p, other) == reason


def test_what_a_connector_needs() -> None:
    assert "kv_address" in (missing_of(worker(), "vllm-p2p-nccl", Facts(), False) or "")
    assert missing_of(worker(kv_address="h:1"), "vllm-p2p-nccl", Facts(), False) is None
    assert "engine id" in (missing_of(worker(), "vllm-mooncake", Facts(), False) or "")
    assert missing_of(worker(role="decode"), "vllm-mooncake", Facts(), False) is None
    assert "callbacks" in (missing_of(worker(), "ascend-layerwise", Facts(), False) or "")
    assert missing_of(worker(), "ascend-layerwise", Facts(), True) is None
    assert "no worker does both legs" in (missing_of(worker(role="mixed"), "sglang", Facts(), True) or "")
    assert missing_of(worker(role="mixed"), "vllm-mooncake", Facts(), True) is None
