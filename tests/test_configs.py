"""The shipped configs load, and what is wrong in a config is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_proxy.config import ConfigError, ConnectorName, effective, load, parse
from omni_proxy.workers.connectors.registry import CONNECTORS

CONFIGS = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))
WORKER = {"name": "p0", "url": "http://127.0.0.1:1", "role": "prefill"}


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.parent.name == "configs"], ids=lambda p: p.name)
def test_shipped_config_loads(path: Path) -> None:
    config = load(path)
    assert config.workers
    assert {w.connector for w in config.workers} <= {None, "auto"} | CONNECTORS.keys()
    assert "listen:" in effective(config)


def test_every_connector_has_an_example() -> None:
    shown = {w.connector for path in CONFIGS if path.parent.name == "configs" for w in load(path).workers}
    assert shown - {None} == set(ConnectorName)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"lsten": {}}, "c: lsten: Extra inputs are not permitted"),
        ({"listen": {"port": 70000}}, "c: listen.port: Input should be less than or equal to 65535 (got 70000)"),
        ({"workers": [{**WORKER, "role": "cook"}]}, "c: workers[0].role: "),
        (
            {"workers": [{**WORKER, "url": "ftp://x"}]},
            "c: workers[0].url: must be http://HOST:PORT or https://HOST:PORT",
        ),
        ({"workers": [{**WORKER, "url": "http://x:99999"}]}, "c: workers[0].url: has an impossible port"),
        ({"workers": [{**WORKER, "weight": float("nan")}]}, "c: workers[0].weight: "),
        ({"workers": [{**WORKER, "connector": "carrier-pigeon"}]}, "c: workers[0].connector: "),
        ({"workers": [WORKER, {**WORKER, "url": "http://127.0.0.1:2"}]}, "c: two workers have the same name: p0"),
        ({"workers": [WORKER, {**WORKER, "name": "p1"}]}, "c: two workers have the same url: http://127.0.0.1:1"),
        ({"timeouts": {"connect_s": 0}}, "c: timeouts.connect_s: Input should be greater than 0 (got 0)"),
        ([], "c: must be a mapping, not list"),
    ],
)
def test_faults_name_their_place(data: object, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, "c")
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


def test_every_fault_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"processes": 0, "extra": 1, "workers": [{"name": "a b"}]}, "c")
    assert len(str(caught.value).splitlines()) == 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("yaml", b"a: [1"), ("utf8", b"\xff\xfe")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=str(path)):
            load(path)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing")


def test_every_connector_that_a_config_may_name_is_there() -> None:
    assert CONNECTORS.keys() == set(ConnectorName) - {ConnectorName.AUTO}


def test_secrets_are_not_shown() -> None:
    config = parse({"workers": [{**WORKER, "api_key": "sk-secret"}]}, "c")
    assert "sk-secret" not in effective(config)
