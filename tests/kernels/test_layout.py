"""Layouts against deployments that were published, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_kernels.device import Device
from omni_kernels.layout import (
    PRESETS,
    Layout,
    LayoutError,
    ModelSizes,
    Pinned,
    Workload,
    choose,
    model_sizes,
    parse_devices,
)
from omni_kernels.layout.chips import CHIPS, known_chip
from omni_kernels.layout.cost import decode_step, prefill_step, slots_for, weight_bytes
from omni_kernels.layout.detected import plannable
from omni_kernels.layout.report import device_line
from omni_kernels.layout.sizes import read_model
from omni_proxy.cli import main

GB = 1e9


@pytest.fixture(scope="module")
def deepseek() -> ModelSizes:
    return read_model("deepseek-v3")


def test_parameters_of_known_models(deepseek: ModelSizes) -> None:
    assert deepseek.parameters == pytest.approx(671e9, rel=0.005)
    assert deepseek.active == pytest.approx(37e9, rel=0.02)
    assert deepseek.kv_bytes(8) * deepseek.layers == 70_272
    for name, total, active in (
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("llama-3.1-70b", 70.6e9, 70.6e9),
    ):
        model = read_model(name)
        assert model.parameters == pytest.approx(total, rel=0.01)
        assert model.active + model.vocabulary / 2 == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(
    ("ranks", "slots", "redundant"),
    [(16, 18, 32), (32, 9, 32), (72, 4, 32), (144, 2, 32), (288, 1, 32), (320, 1, 64)],
)
def test_experts_a_rank_are_those_of_published_layouts(
    deepseek: ModelSizes, ranks: int, slots: int, redundant: int
) -> None:
    """DeepSeek's EP32 and EP144, SGLang's EP72, and 320 ranks as in DeepSeek-V3's report and on CloudMatrix384."""
    layout = Layout(ranks, 1, slots_for(deepseek, ranks))
    assert (layout.slots, layout.redundant(deepseek)) == (slots, redundant)


DECODES = {
    "DeepSeek, EP144 of H800, 4989 tokens held: 14.8 k tokens/s a node": ("H800", 144, 92, 4989, 1850),
    "SGLang, EP72 of H100, prompts of 2000: 22.3 k tokens/s a node": ("H100", 72, 256, 2050, 2785),
    "CloudMatrix384, EP320 of 910C dies, 96 sequences a chip: 1943 tokens/s": ("910C", 320, 48, 4608, 972),
}
PREFILLS = {
    "SGLang, EP32 of H100, prompts of 4096: 50.3 k tokens/s a node": ("H100", 32, 8192, 4096, 6288),
    "CloudMatrix384, EP32 of 910C dies, prompts of 4096: 6688 tokens/s a chip": ("910C", 32, 8192, 4096, 3344),
}


@pytest.mark.parametrize("published", DECODES)
def test_decode_comes_out_as_published(deepseek: ModelSizes, published: str) -> None:
    chip, ranks, batch, context, rate = DECODES[published]
    layout = Layout(ranks, 1, slots_for(deepseek, ranks))
    step = decode_step(deepseek, CHIPS[chip], layout, batch, context)
    assert batch / step == pytest.approx(rate, rel=0.25)
    held = batch * context * deepseek.layers * deepseek.kv_bytes(1)
    assert weight_bytes(deepseek, layout) + held < CHIPS[chip].memory_bytes


@pytest.mark.parametrize("published", PREFILLS)
def test_prefill_comes_out_as_published(deepseek: ModelSizes, published: str) -> None:
    chip, ranks, tokens, prompt, rate = PREFILLS[published]
    layout = Layout(ranks, 1, slots_for(deepseek, ranks))
    step = prefill_step(deepseek, CHIPS[chip], layout, tokens, prompt)
    assert tokens / step == pytest.approx(rate, rel=0.3)


@pytest.mark.parametrize(
    ("prefill", "decode", "slots"), [(16, 144, (18, 2)), (16, 288, (18, 1)), (32, 144, (9, 2)), (32, 288, (9, 1))]
)
def test_the_usual_instances_of_an_ascend_cluster_fit_and_keep_the_limits(
    deepseek: ModelSizes, prefill: int, decode: int, slots: tuple[int, int]
) -> None:
    plan = choose(deepseek, parse_devices("910C:384"), Workload(), Pinned(prefill, decode))
    assert plan.prefill is not None
    assert plan.within_limits
    assert (plan.prefill.layout.slots, plan.decode.layout.slots) == slots
    assert plan.decode.layout.tp == 1, "MLA's cache is not divided by TP, so attention is data parallel"
    assert plan.decode_count == 288 // decode
    assert plan.used_ranks >= 0.85 * 768
    for one in (plan.prefill, plan.decode):
        assert one.weight_bytes + one.kv_bytes < 64 * GB
    assert 40 <= plan.decode.batch <= 64


def test_ep16_splits_attention_since_its_weights_would_not_fit_beside_the_experts(deepseek: ModelSizes) -> None:
    plan = choose(deepseek, parse_devices("910C:384"), Workload(), Pinned(16, 144))
    assert plan.prefill is not None
    assert plan.prefill.layout.tp > 1
    assert weight_bytes(deepseek, Layout(16, 1, 18)) > 0.92 * 64 * GB


def test_a_large_cluster_gets_large_decode_and_small_prefill_instances(deepseek: ModelSizes) -> None:
    plan = choose(deepseek, parse_devices("910C:384"), Workload())
    assert plan.prefill is not None
    assert plan.prefill.layout.ranks <= 32
    assert 96 <= plan.decode.layout.ranks <= 320
    assert plan.used_ranks >= 0.95 * 768


def test_wide_ep_beats_narrow_ep_a_rank(deepseek: ModelSizes) -> None:
    narrow = choose(deepseek, parse_devices("910C:384"), Workload(), Pinned(16, 32))
    wide = choose(deepseek, parse_devices("910C:384"), Workload(), Pinned(16, 144))
    assert wide.decode.per_rank > 1.3 * narrow.decode.per_rank


def test_a_cached_prompt_needs_fewer_prefill_instances(deepseek: ModelSizes) -> None:
    devices, pinned = parse_devices("910C:384"), Pinned(32, 144)
    cold = choose(deepseek, devices, Workload(output_tokens=512), pinned)
    warm = choose(deepseek, devices, Workload(output_tokens=512, cached_share=0.75), pinned)
    share = [p.prefill_count / p.decode_count for p in (cold, warm)]
    assert share[1] < share[0] / 2
    assert warm.requests_s > cold.requests_s


def test_one_small_device_does_both_roles() -> None:
    plan = choose(read_model("qwen3-30b-a3b"), parse_devices("H200:1"), Workload())
    assert plan.prefill is None
    assert plan.used_ranks == 1


def test_a_dense_model_is_split_inside_a_node() -> None:
    plan = choose(read_model("llama-3.1-70b"), parse_devices("H100:16"), Workload())
    assert plan.decode.layout.slots == 0
    assert plan.decode.layout.tp == plan.decode.layout.ranks <= 8


def test_limits_that_nothing_keeps_are_said(deepseek: ModelSizes) -> None:
    plan = choose(deepseek, parse_devices("910C:384"), Workload(tpot_s=0.001))
    assert not plan.within_limits


BAD: dict[str, tuple[Any, str]] = {
    "chip": (lambda m: parse_devices("H900:2"), "devices: unknown chip 'H900'"),
    "none": (lambda m: parse_devices("H800:0"), "devices: the number of H800 must be from 1"),
    "many": (lambda m: parse_devices("H800:" + "9" * 5000), "devices: the number of H800 must be from 1"),
    "digits": (lambda m: parse_devices("H800:²"), "devices: the number of H800"),
    "memory": (lambda m: choose(m, parse_devices("H800:8"), Workload()), "needs 16 x H800 an instance"),
    "pinned": (lambda m: choose(m, parse_devices("H800:32"), Workload(), Pinned(64)), "prefill-ranks: must be from 1"),
    "both": (lambda m: choose(m, parse_devices("H800:32"), Workload(), Pinned(32, 32)), "need 64 ranks, got 32"),
    "type": (lambda m: read_model("deepseek-v3", "int3"), "dtype: must be one of"),
    "file": (lambda m: read_model("/no/such"), "model: /no/such: No such file"),
    "field": (lambda m: model_sizes({"hidden_size": "x"}, "c"), "c: hidden_size must be a positive integer, got 'x'"),
    "missing": (lambda m: model_sizes({"hidden_size": 8}, "c"), "c: num_hidden_layers is missing"),
    "experts": (
        lambda m: model_sizes({**PRESETS["qwen3-30b-a3b"], "num_experts_per_tok": 999}, "c"),
        "num_experts_per_tok must be at most the 128 experts",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_planned_is_named(deepseek: ModelSizes, what: str) -> None:
    run, message = BAD[what]
    with pytest.raises(LayoutError) as caught:
        run(deepseek)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_prints_a_layout_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["devices", "deepseek-v3", "--devices", "910C:384", "--decode-ranks", "288"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "layout for 384 x 910C = 768 dies" in printed
    assert "EP 288: 1 experts a rank, 32 redundant copies" in printed
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["decode"]["layout"] == {"ranks": 288, "tp": 1, "slots": 1, "dp": 288, "redundant": 32}
    assert plan["requests_s"] > 0


def test_the_command_plans_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert "qwen3_moe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deepseek-v3", "--devices", "H800:x"], "devices: the number of H800"),
        (["nowhere", "--devices", "H800"], "model: nowhere"),
        (["deepseek-v3", "--devices", "H800:64", "--cached-share", "1"], "cached-share: must be in 0..1"),
        (["deepseek-v3", "--devices", "H800:64", "--tpot-ms", "nan"], "tpot-ms: must be above 0"),
    ],
)
def test_a_bad_question_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["devices", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("omni-proxy devices: ")
    assert message in said
    assert said.count("\n") == 1


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match="not JSON"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LayoutError, match="must be an object"):
        read_model(str(tmp_path))


def test_drivers_names_of_chips() -> None:
    names = {"NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100", "Ascend910_9382": "910C", "Ascend910B3": "910B"}
    assert {name: chip.name for name in names if (chip := known_chip(name))} == names
    assert known_chip("NVIDIA GeForce RTX 4090") is None


def test_found_accelerators_are_planned_for() -> None:
    cpu = Device("cpu", 0, "x", 4, int(8 * GB), int(8 * GB))
    found = [cpu, *(Device("cuda", i, "NVIDIA H200", 132, int(140 * GB), int(139 * GB)) for i in range(8))]
    devices = plannable(found)
    assert (devices.chip.name, devices.ranks, devices.chip.memory_bytes) == ("H200", 8, 140 * GB)
    dies = [cpu, *(Device("npu", i, "Ascend910_9382", 24, int(64 * GB), int(60 * GB)) for i in range(16))]
    assert plannable(dies).ranks == 16
    assert plannable([cpu]).chip.kind == "cpu"
    with pytest.raises(LayoutError, match="RTX is not in the catalogue"):
        plannable([cpu, Device("cuda", 0, "RTX", 1, 1, 1)])
    with pytest.raises(LayoutError, match="free memory"):
        plannable([Device("cpu", 0, "x", 4, 0, 0)])


def test_a_device_in_words() -> None:
    line = device_line(Device("cuda", 1, "NVIDIA H200", 132, int(141 * GB), int(100 * GB), ("sm_90",), (0,)))
    assert line == "cuda:1: NVIDIA H200, 132 multiprocessors, 100 of 141 GB free, sm_90, reads the memory of 0"
