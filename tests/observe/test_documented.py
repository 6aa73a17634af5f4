"""The table of metrics, the rules and the dashboard name what is there, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from omni_proxy.build import Gateway
from omni_proxy.config import parse
from omni_proxy.flow.prewarming import PrewarmCounts
from omni_proxy.observe.prewarming import PrewarmMetrics
from omni_proxy.observe.replicas import ReplicaMetrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
_ROW = re.compile(r"^\| `(omni_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| [^|]+ \|$", re.MULTILINE)
_NAME = re.compile(r"\bomni_[a-z0-9_]+")
Shown = dict[str, tuple[str, frozenset[str]]]


class Alone:
    """A way to other gateways that do not exist."""

    connected = True
    failures = sent = received = malformed = 0

    class others:
        lost = 0

        @staticmethod
        def names() -> list[str]:
            return []

    def seconds_alone(self) -> float:
        return 0.0


async def shown() -> Shown:
    """Type and labels of every family of a gateway with all its parts."""
    gateway = Gateway(parse({"workers": []}, "test"))
    try:
        families: list[Metric] = [
            *gateway.scheduling.registry.collect(),
            *ReplicaMetrics(Alone()).collect(),
            *PrewarmMetrics(PrewarmCounts).collect(),
        ]
    finally:
        await gateway.scheduling.close()
        gateway.front.upstreams.close()
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            frozenset(getattr(family, "_labelnames", ())),
        )
        for family in families
    }


def documented() -> Shown:
    rows = _ROW.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    assert all(unit.strip() for _, _, unit, _ in rows)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, _, labels in rows}


def series(families: Shown) -> set[str]:
    """Names that a query may use."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, (kind, _) in families.items() for suffix in suffixes.get(kind, ("",))}


def expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads((ROOT / "configs/grafana/omni-proxy.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    found += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    for file in ("recording.yml", "alerts.yml"):
        groups = yaml.safe_load((PROMETHEUS / file).read_text(encoding="utf-8"))["groups"]
        found += [rule["expr"] for group in groups for rule in group["rules"]]
    return found


async def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    there, told = await shown(), documented()
    assert sorted(there) == sorted(told)
    assert {name: found for name, found in there.items() if told[name] != found} == {}


async def test_every_query_asks_for_what_is_there() -> None:
    known = series(await shown())
    asked = {name for expression in expressions() for name in _NAME.findall(re.sub(r'"[^"]*"', "", expression))}
    assert len(asked) > 30
    assert asked - known == set()


async def test_every_query_uses_labels_that_are_there() -> None:
    labels = {label for _, found in (await shown()).values() for label in found}
    allowed = labels | {"job", "instance", "le"}
    grouped = {
        label.strip()
        for expression in expressions()
        for listed in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in listed.split(",")
    }
    matched = {label for e in expressions() for listed in re.findall(r"\{([^}]*)\}", e) for label in _labels(listed)}
    assert (grouped | matched) - allowed == set()


def _labels(selector: str) -> list[str]:
    return re.findall(r"(\w+)=", re.sub(r'"[^"]*"', "", selector))


def test_recorded_names_are_those_that_alerts_use() -> None:
    recorded = set(re.findall(r"record: (\S+)", (PROMETHEUS / "recording.yml").read_text(encoding="utf-8")))
    used = set(re.findall(r"\bomni:[a-z0-9_:]+", "\n".join(expressions())))
    assert used <= recorded


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_config_and_rules() -> None:
    for command in (
        ["check", "config", str(PROMETHEUS / "prometheus.yml")],
        ["test", "rules", str(ROOT / "tests" / "observe" / "alerts_test.yml")],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
