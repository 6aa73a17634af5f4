"""What goes into a config besides its file, and what never comes out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.access.keys import hash_key, make_key
from omni_proxy.config import Config, ConfigError, effective, load, parse
from omni_proxy.schema import config_schema

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "configs"
WORKER = {"name": "p0", "url": "http://127.0.0.1:1", "role": "prefill"}


def write(folder: Path, **config: Any) -> Path:
    path = folder / "omni.yaml"
    path.write_text(json.dumps(config))
    return path


# ------------------------------------------------------------------------------------- environment


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, listen={"port": 1, "host": "::1"}, workers=[WORKER])
    environment = {
        "OMNI_PROXY__LISTEN__PORT": "8123",
        "OMNI_PROXY__LIMITS__QUEUE_TIMEOUT_S": "2.5",
        "OMNI_PROXY__WORKERS__0__URL": "http://elsewhere:9",
        "OMNI_PROXY__RESUME": "[m1, m2]",
        "OMNI_PROXY__ACCESS_LOG__PATH": "null",
        "OMNI_PROXY_OTHER": "x",
        "PATH": "/bin",
    }
    config = load(path, environment)
    assert (config.listen.host, config.listen.port, config.limits.queue_timeout_s) == ("::1", 8123, 2.5)
    assert (config.workers[0].url, config.resume) == ("http://elsewhere:9", ("m1", "m2"))
    assert load(path, {}).listen.port == 1


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("OMNI_PROXY__LISTEN__PORT", "high", "OMNI_PROXY__LISTEN__PORT: listen.port: Input should be a valid integer"),
        ("OMNI_PROXY__LISTEN__PROT", "1", "OMNI_PROXY__LISTEN__PROT: listen.prot: Extra inputs are not permitted"),
        ("OMNI_PROXY__WORKERS__7__URL", "x", "OMNI_PROXY__WORKERS__7__URL: there are 1 entries"),
        (
            "OMNI_PROXY__WORKERS__0__URL__X",
            "x",
            "OMNI_PROXY__WORKERS__0__URL__X: 'x' is looked for in what is no section",
        ),
        ("OMNI_PROXY__", "1", "OMNI_PROXY__: names no field"),
        ("OMNI_PROXY__LISTEN____PORT", "1", "OMNI_PROXY__LISTEN____PORT: names no field"),
        ("OMNI_PROXY__MODEL", "[1", "OMNI_PROXY__MODEL: is not YAML"),
    ],
)
def test_a_bad_variable_is_named(tmp_path: Path, name: str, value: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, workers=[WORKER]), {name: value})
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------- secrets


SECRETS = {
    "workers": [{**WORKER, "api_key": "worker-secret"}],
    "admin": {"port": 0, "token": "admin-secret"},
    "replicas": {"redis": "redis://user:redis-secret@cache:6379/0"},
    "discovery": {"registration": {"port": 0, "token": "registration-secret"}},
}


def test_secrets_lie_in_files(tmp_path: Path) -> None:
    for name, text in (("key", "worker-secret\n"), ("token", "admin-secret"), ("redis", "redis://:redis-secret@c:1")):
        (tmp_path / name).write_text(text)
    path = write(
        tmp_path,
        workers=[{**WORKER, "api_key": f"file:{tmp_path}/key"}],
        admin={"port": 0, "token": f"file:{tmp_path}/token"},
        replicas={"redis": f"file:{tmp_path}/redis"},
    )
    config = load(path, {})
    assert config.admin is not None
    assert config.replicas is not None
    assert (config.workers[0].api_key, config.admin.token) == ("worker-secret", "admin-secret")
    assert config.replicas.redis == "redis://:redis-secret@c:1"
    (tmp_path / "token").write_text("another-secret")
    again = load(path, {})
    assert again.admin is not None
    assert again.admin.token == "another-secret"


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe\xfd", b"x" * 70_000])
def test_a_file_without_a_secret_is_named_and_not_shown(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    path = write(tmp_path, workers=[{**WORKER, "api_key": f"file:{tmp_path}/key"}])
    with pytest.raises(ConfigError, match=r"workers\[0\]\.api_key: .*/key: ") as caught:
        load(path, {})
    assert len(str(caught.value)) < 300
    assert "two" not in str(caught.value)


def test_tenants_lie_in_a_file(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    a, b = hash_key(make_key()), hash_key(make_key())
    tenants.write_text(f"tenants: {{b: {{keys: ['{b}'], concurrent: 3}}}}")
    path = write(tmp_path, access={"tenants": {"a": {"keys": [a]}}, "tenants_file": str(tenants)})
    assert list(load(path, {}).access.tenants) == ["a", "b"]
    for text, fault in (
        (f"tenants: {{a: {{keys: ['{b}']}}}}", "the config has a tenant a, too"),
        ("[]", "must hold 'tenants:'"),
        ("tenants: {b: {keys: []}}", r"access\.tenants\.b\.keys"),
        ("tenants: {", "tenants.yaml: "),
    ):
        tenants.write_text(text)
        with pytest.raises(ConfigError, match=fault):
            load(path, {})
    tenants.unlink()
    with pytest.raises(ConfigError, match=r"tenants\.yaml: No such file"):
        load(path, {})


def test_a_file_of_tenants_without_tenants_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("tenants: {}")
    assert load(write(tmp_path, access={"tenants_file": str(tmp_path / "t")}), {}).access.asks_for_keys


def test_no_secret_is_printed() -> None:
    shown = effective(parse(SECRETS, "c"))
    assert "secret" not in shown
    assert shown.count("***") == 4


@pytest.mark.parametrize(
    "data",
    [
        {"admin": {"port": 0, "token": "secret"}},
        {"workers": [{**WORKER, "api_key": {"secret": 1}}]},
        {"workers": [{**WORKER, "api_key": ["secret"]}]},
        {"replicas": {"redis": "http://:secret@x"}},
        {"access": {"tenants": {"a": {"keys": ["secret"]}}}},
        {"access": {"tenants": {"a": {"keys": "secret"}}}},
    ],
)
def test_a_wrong_secret_is_not_repeated(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, "c")
    assert "secret" not in str(caught.value)


# ------------------------------------------------------------------------------------------ schema


def test_the_schema_that_is_shipped_is_that_of_the_code() -> None:
    assert (CONFIGS / "schema.json").read_text() == config_schema(), "omni-proxy schema > configs/schema.json"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_fit_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(config_schema()))


def test_the_schema_says_what_fields_are_and_finds_faults() -> None:
    schema = json.loads(config_schema())
    assert schema["$defs"]["Tenant"]["properties"]["tokens_per_minute"]["description"] == "Of prompts and answers."
    assert schema["$defs"]["ServedModel"]["properties"]["send_token_ids"]["description"]
    for wrong in ({"lsten": {}}, {"listen": {"port": -1}}, {"workers": [{"name": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


# ------------------------------------------------------------------------------- nothing crashes it


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = [*Config.model_fields, "name", "url", "role", "port", "host", "token", "keys", "tenants", "api_key", "models"]
NAMED = st.recursive(JSON, lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=4), max_leaves=12)


@given(NAMED)
def test_any_data_is_a_config_or_a_fault(data: Any) -> None:
    fault = "c: "
    try:
        assert isinstance(parse(data, "c"), Config)
    except ConfigError as exc:
        fault = str(exc)
    assert fault.startswith("c: ")


@given(
    st.one_of(st.binary(max_size=60), st.text(alphabet="{}[]:&*!-?|>'\"%@`# \n\tab01.~<", max_size=40).map(str.encode))
)
def test_any_file_is_a_config_or_a_fault(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    fault = str(path)
    try:
        assert isinstance(load(path, {}), Config)
    except ConfigError as exc:
        fault = str(exc)
    assert fault.startswith(str(path))


# --------------------------------------------------------------------------------------------- CLI


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = (sys.executable, "-m", "omni_proxy", *arguments)
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=os.environ | environment, check=False, cwd=ROOT
    )


@pytest.mark.slow
def test_the_verbs(tmp_path: Path) -> None:
    made = run("key").stdout.split()
    assert run("key", "--stdin", stdin=made[1] + "\n").stdout.strip() == made[3]
    refused = run("key", "--stdin", stdin="short")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    path = str(write(tmp_path, **SECRETS))
    for command in (("check", "-c", path), ("serve", "-c", path, "--print-config")):
        shown = run(*command, OMNI_PROXY__LISTEN__PORT="8124")
        assert shown.returncode == 0
        assert "port: 8124" in shown.stdout
        assert "secret" not in shown.stdout + shown.stderr
    wrong = run("check", "-c", path, OMNI_PROXY__LISTEN__PORT="x")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "OMNI_PROXY__LISTEN__PORT: listen.port" in wrong.stderr
