"""The config's part of scheduling: every fault is one line at start."""

from __future__ import annotations

import pytest

from omni_proxy.config import Config, ConfigError, OrderName, parse
from omni_proxy.parts import core_settings
from omni_proxy.scheduler.registry import ORDERS
from omni_proxy.scheduler.settings import SchedulingSettings


def test_config_and_core_have_the_same_defaults_and_names() -> None:
    assert core_settings(Config()).scheduling == SchedulingSettings()
    assert [name.value for name in OrderName] == list(ORDERS)


def test_what_is_set_arrives() -> None:
    data = {
        "scheduling": {
            "order": "deadline",
            "ttft_target_s": 2,
            "fair_tenants": True,
            "tenant_weights": {"a": 3},
            "aggregate_below_tokens": None,
            "starvation_timeout_s": 5,
        }
    }
    chosen = core_settings(parse(data, "omni.yaml")).scheduling
    assert (chosen.order, chosen.ttft_target_s, chosen.fair_tenants) == ("deadline", 2.0, True)
    assert (dict(chosen.tenant_weights), chosen.aggregate_below_tokens) == ({"a": 3.0}, None)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("order", "best", "scheduling.order"),
        ("length_weight", -1, "scheduling.length_weight"),
        ("wait_weight", float("nan"), "scheduling.wait_weight"),
        ("starvation_timeout_s", 0, "scheduling.starvation_timeout_s"),
        ("tenant_weights", {"a": 0}, "scheduling.tenant_weights.a"),
        ("aggregate_below_tokens", -5, "scheduling.aggregate_below_tokens"),
        ("orders", "fcfs", "scheduling.orders"),
    ],
)
def test_faults_name_their_place(key: str, value: object, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as raised:
        parse({"scheduling": {key: value}}, "omni.yaml")
    assert "\n" not in str(raised.value)


def test_weights_that_sum_to_nothing() -> None:
    with pytest.raises(ConfigError, match="needs a weight above 0"):
        parse({"scheduling": {"length_weight": 0, "wait_weight": 0}}, "omni.yaml")
    parse({"scheduling": {"length_weight": 0, "wait_weight": 0, "order": "fcfs"}}, "omni.yaml")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"group": "b"}, r"worker p0: no decode worker has its group '' and its connector"),
        ({"connector": "omni"}, r"worker p0: .* connector 'sglang'"),
        ({}, None),
        ({"role": "mixed", "group": "b"}, None),
    ],
)
def test_prefill_without_anybody_to_hand_over_to(changes: dict[str, str], fault: str | None) -> None:
    p0 = {"name": "p0", "url": "http://a:1", "role": "prefill", "connector": "sglang"}
    d0 = {"name": "d0", "url": "http://b:1", "role": "decode", "connector": "sglang", **changes}
    if fault is None:
        parse({"workers": [p0, d0]}, "omni.yaml")
        return
    with pytest.raises(ConfigError, match=fault) as raised:
        parse({"workers": [p0, d0]}, "omni.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("ttft_targets_s", {0: 0}, "scheduling.ttft_targets_s"),
        ("ttft_targets_s", {"soon": 1}, "scheduling.ttft_targets_s"),
        ("tpot_limit_s", -0.1, "scheduling.tpot_limit_s"),
        ("tpot_limits_s", {1: "fast"}, "scheduling.tpot_limits_s"),
        ("starved_share", 0, "scheduling.starved_share"),
        ("starved_share", 1.5, "scheduling.starved_share"),
        ("ageing", float("nan"), "scheduling.ageing"),
        ("overflow_s", -1, "scheduling.overflow_s"),
        ("elastic_roles", "perhaps", "scheduling.elastic_roles"),
    ],
)
def test_faults_of_targets_and_shares(key: str, value: object, fault: str) -> None:
    test_faults_name_their_place(key, value, fault)
