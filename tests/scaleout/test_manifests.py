"""The Kubernetes manifests: valid for the API, and their gateway config is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_proxy.config import parse
from omni_proxy.messages import Role
from omni_proxy.workers.discovery.kubernetes import candidate
from omni_proxy.workers.discovery.vetting import vet

FOLDER = Path(__file__).parents[2] / "configs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in documents(path):
        if one["kind"] != "PodMonitor":  # of an operator: not in the API's own schema
            validate.validate(one, "1.30", strict=True)


def test_the_gateway_config_in_its_map_is_a_config() -> None:
    (config_map,) = (one for one in documents(FOLDER / "gateway.yaml") if one["kind"] == "ConfigMap")
    config = parse(yaml.safe_load(config_map["data"]["config.yaml"]), "config.yaml")
    (deployment,) = (one for one in documents(FOLDER / "gateway.yaml") if one["kind"] == "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["containers"][0]["ports"][0]["containerPort"] == config.listen.port
    assert spec["terminationGracePeriodSeconds"] > config.timeouts.drain_s


@pytest.mark.parametrize("name", ["vllm-2p1d.yaml", "vllm-ascend-2p1d.yaml"])
def test_the_example_pods_are_found_as_two_p_and_one_d(name: str) -> None:
    found = []
    for one in documents(FOLDER / name):
        template = one["spec"]["template"]
        for n in range(one["spec"]["replicas"]):
            meta = {**template["metadata"], "name": f"{one['metadata']['name']}-{n}"}
            ready = [{"type": "Ready", "status": "True"}]
            made = candidate({"metadata": meta, "status": {"podIP": f"10.0.0.{len(found)}", "conditions": ready}})
            assert made is not None
            found.append(made)
    workers, refused = vet("kubernetes", found)
    assert refused == []
    assert sorted(w.role for w in workers) == [Role.DECODE, Role.PREFILL, Role.PREFILL]
