"""The Helm chart, as `helm template` renders it: valid for the API, with a config that is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_proxy.config import load

CHART = Path(__file__).parents[2] / "configs" / "kubernetes" / "chart"
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm (docs/deploy.md says where from)")
ADMIN = ("--set", "admin.enabled=true")
ALL = (*ADMIN, "--set", "admin.token=a-long-token", "--set", "podMonitor.enabled=true")
ALL_OTHERS = (
    *(*ADMIN, "--set", "admin.existingSecret=mine", "--set", "discovery.endpoints=true", "--set", "redis="),
    *(
        "--set",
        "discovery.namespace=workers",
        "--set",
        "autoscaling.enabled=false",
        "--set",
        "config.timeouts.drain_s=90",
    ),
    *(
        "--set-json",
        'networkPolicy.operators=[{"podSelector":{}}]',
        "--set-json",
        'networkPolicy.clients=[{"podSelector":{}}]',
    ),
    *(
        "--set",
        "nodeSelector.zone=a",
        "--set-json",
        'tolerations=[{"operator":"Exists"}]',
        "--set",
        "podAnnotations.a=b",
    ),
)


def render(*settings: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = (HELM, "template", "gw", str(CHART), "--namespace", "inference", *settings)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(text) if one}


@needs_helm
@pytest.mark.parametrize("settings", [(), ALL, ALL_OTHERS], ids=["as it is", "all", "all others"])
def test_what_the_chart_makes_is_valid(settings: tuple[str, ...], tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    rendered = render(*settings)
    assert rendered.returncode == 0, rendered.stderr
    found = by_kind(rendered.stdout)
    for kind, one in found.items():
        if kind != "PodMonitor":  # of an operator: not in the API's own schema
            validate.validate(one, "1.30", strict=True)
    token = tmp_path / "token"
    token.write_text("a-long-token")
    text = found["ConfigMap"]["data"]["config.yaml"].replace("/etc/omni-proxy-secrets/token", str(token))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load(path)
    spec = found["Deployment"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
    assert ports["http"] == config.listen.port
    assert ports.get("admin") == (None if config.admin is None else config.admin.port)
    assert spec["terminationGracePeriodSeconds"] > config.timeouts.drain_s
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= (
        found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )


@needs_helm
def test_what_settings_change() -> None:
    plain, full, others = (by_kind(render(*settings).stdout) for settings in ((), ALL, ALL_OTHERS))
    assert set(full) - set(plain) == {"Secret", "PodMonitor"}
    assert set(plain) - set(others) == {"HorizontalPodAutoscaler"}
    assert "Secret" not in others, "an existing one is used"
    assert "replicas" not in plain["Deployment"]["spec"], "the autoscaler decides"
    assert "a-long-token" not in full["ConfigMap"]["data"]["config.yaml"]
    assert others["Role"]["metadata"]["namespace"] == "workers"
    assert others["Role"]["rules"][0]["resources"] == ["endpointslices"]
    assert len(plain["NetworkPolicy"]["spec"]["ingress"]) == 1, "nobody connects to the operators' port unless named"
    assert len(others["NetworkPolicy"]["spec"]["ingress"]) == 2


@needs_helm
def test_an_admin_port_without_a_token_is_refused() -> None:
    rendered = render(*ADMIN)
    assert rendered.returncode != 0
    assert "admin.token or admin.existingSecret is required" in rendered.stderr
