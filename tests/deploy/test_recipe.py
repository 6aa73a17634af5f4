"""Recipes: what is filled in, and what is refused, with its field and its value."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.cli import main
from omni_proxy.config import ConfigError
from omni_proxy.deploy.recipe import Deployment, deployment, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))
GOOD: dict[str, Any] = {
    "name": "two",
    "engine": "vllm",
    "model": "m",
    "hosts": {"a": {"address": "10.0.0.1", "devices": 8}, "b": {"address": "10.0.0.2", "devices": 8}},
    "prefill": {"tensor_parallel": 2, "at": [{"host": "a", "count": 2}]},
    "decode": {"tensor_parallel": 4, "at": [{"host": "b"}]},
    "gateway": {"host": "a"},
}


def made(**changes: Any) -> Deployment:
    """GOOD with values put under dotted names; None takes them out."""
    data = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *above, last = path.split("__")
        inner = data
        for key in above:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return deployment(data, "r")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_good(path: Path) -> None:
    assert load_recipe(path).gateway.workers


def test_ports_and_devices_are_given_out_host_by_host() -> None:
    workers = made().workers
    assert [(w.launch.name, w.host, w.devices) for w in workers] == [
        ("prefill-0", "a", (0, 1)),
        ("prefill-1", "a", (2, 3)),
        ("decode-0", "b", (0, 1, 2, 3)),
    ]
    assert [w.launch.port for w in workers] == [8100, 8101, 8100]
    assert [w.launch.kv_port for w in workers] == [15600, 15602, 15600]
    assert [w.launch.index for w in workers] == [0, 1, 2]


def test_what_is_named_goes_before_what_is_chosen() -> None:
    at = [{"host": "a"}, {"host": "a", "port": 8100, "kv_port": 15600, "devices": [0, 1]}]
    workers = made(prefill__at=at, gateway__config={"listen": {"port": 8101}}).workers
    first, second = workers[:2]
    assert (first.launch.port, first.launch.kv_port, first.devices) == (8102, 15602, (2, 3))
    assert (second.launch.port, second.launch.kv_port, second.devices) == (8100, 15600, (0, 1))


def test_numbers_will_do_for_flags_and_variables() -> None:
    launch = made(prefill__flags=["--seed", 7], prefill__env={"A": 1}).workers[0].launch
    assert launch.flags == ("--seed", "7")
    assert launch.env == {"A": "1"}


def test_the_gateway_listens_to_this_machine_only_unless_told() -> None:
    assert made().gateway.listen.host == "127.0.0.1"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"engine": "pigeon"}, "r: engine: Input should be 'embedded', 'vllm', 'vllm-ascend' or 'sglang' (got 'pigeon')"),
    ({"connector": "sglang"}, "r: connector: the engine vllm has vllm-nixl, "),
    ({"model": None}, "r: model: is required for the engine vllm (got None)"),
    ({"name": "Two Words"}, "r: name: String should match pattern"),
    ({"hosts__a__address": "http://10.0.0.1"}, "r: hosts.a.address: must be an IP address or the name of a host"),
    ({"hosts__a__address": "10.0.0.300"}, "r: hosts.a.address: must be an IP address or the name of a host"),
    ({"hosts__b__address": "10.0.0.1"}, "r: hosts.a.address: belongs to two hosts (got '10.0.0.1')"),
    ({"hosts__a__devices": -1}, "r: hosts.a.devices: "),
    ({"hosts": {}}, "r: hosts: "),
    ({"decode": None}, "r: decode: is required where there is 'prefill' (got None)"),
    ({"prefill": None, "decode": None}, "r: prefill: is required, with decode, or mixed (got None)"),
    ({"prefill__at": []}, "r: prefill.at: "),
    ({"prefill__at": [{"host": "c"}]}, "r: prefill.at[0].host: there is no host of that name (got 'c')"),
    ({"gateway__host": "c"}, "r: gateway.host: there is no host of that name (got 'c')"),
    ({"prefill__tensor_parallel": 0}, "r: prefill.tensor_parallel: "),
    ({"prefill__tensor_parallel": 5}, "r: prefill.at[0]: a worker needs 5 devices, and a has 3 of 8 left (got 'a')"),
    (
        {"prefill__at": [{"host": "a", "devices": [0]}]},
        "r: prefill.at[0].devices: tensor_parallel 2 x data_parallel 1 needs 2 devices (got [0])",
    ),
    (
        {"prefill__at": [{"host": "a", "devices": [7, 8]}]},
        "r: prefill.at[0].devices: a has 8 devices, counted from 0 (got 8)",
    ),
    (
        {"prefill__at": [{"host": "a", "devices": [0, 1]}, {"host": "a", "devices": [1, 2]}]},
        "r: prefill.at[1].devices: device 1 of a belongs to prefill.at[0] (got 1)",
    ),
    ({"prefill__at": [{"host": "a", "devices": [0, 1], "count": 2}]}, "r: prefill.at[0]: devices: names those of one"),
    (
        {"prefill__at": [{"host": "a", "port": 8000}]},
        "r: prefill.at[0].port: port 8000 of a belongs to gateway (got 8000)",
    ),
    ({"prefill__at": [{"host": "a", "port": 65535, "count": 2}]}, "r: prefill.at[0].port: there are no 2 ports from"),
    ({"prefill__at": [{"host": "a", "port": 0}]}, "r: prefill.at[0].port: "),
    ({"prefill__flags": ["--a\nExecStart=x"]}, "r: prefill.flags[0]: String should match pattern"),
    ({"prefill__env": {"A-B": "1"}}, "r: prefill.env.A-B"),
    ({"prefill__worker": {"url": "http://x"}}, "r: prefill: worker.url: is made from the rest, and cannot be set"),
    ({"prefill__worker": {"max_seqs": 0}}, "r: prefill: worker.max_seqs: Input should be greater than or equal to 1"),
    ({"prefill__command": ["{prot}"]}, "r: prefill: command: only {name}, {role}, "),
    ({"prefill__command": ["{port.__class__}"]}, "r: prefill: command: only {name}, {role}, "),
    ({"gateway__config": {"workers": []}}, "r: gateway.config.workers: is made from the recipe"),
    ({"gateway__config": {"listen": {"port": 99999}}}, "r: gateway.config: listen.port: "),
    ({"gateway__config": {"lsten": {}}}, "r: gateway.config: lsten: Extra inputs are not permitted"),
    ({"connector": "lmcache"}, "r: prefill.env: LMCACHE_CONFIG_FILE is required for the connector lmcache (got {})"),
    ({"engine": "embedded"}, "r: prefill: the embedded engine has one rank"),
    ({"colour": "red"}, "r: colour: Extra inputs are not permitted (got 'red')"),
]


@pytest.mark.parametrize(("changes", "fault"), BAD, ids=[fault[3:60] for _, fault in BAD])
def test_bad_recipes_are_refused_by_field_and_value(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**changes)
    assert str(caught.value).splitlines()[0].startswith(fault)


def test_the_command_says_it_in_one_line_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\nengine: vllm\n")
    assert main(["deploy", "render", str(recipe), "--to", "shell"]) == 2
    said = capsys.readouterr().err
    assert f"omni-proxy deploy: {recipe}: hosts: Field required" in said
    assert main(["deploy", "render", str(tmp_path / "none.yaml"), "--to", "shell"]) == 2
    assert "No such file" in capsys.readouterr().err
