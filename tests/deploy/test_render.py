"""What is rendered: as it was last looked at, valid for whoever reads it, and safe with any text in it.

After a change that is meant, write the golden files anew:
    for t in systemd compose kubernetes shell; do omni-proxy deploy render configs/recipes/NAME.yaml --to $t \\
        -o tests/deploy/golden/NAME/$t; done
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from omni_proxy.config import ConfigError, parse
from omni_proxy.deploy.command import RENDERERS, run_render
from omni_proxy.deploy.recipe import Deployment, deployment, load_recipe
from omni_proxy.deploy.started import started
from omni_proxy.messages import Role
from omni_proxy.workers.discovery.kubernetes import candidate
from omni_proxy.workers.discovery.vetting import vet
from tests.deploy.test_recipe import GOOD, RECIPES, made

GOLDEN = Path(__file__).parent / "golden"
NASTY = ("a b", "$HOME", "%h", "it's", '"quoted"', "back\\slash", "$(id)", "`id`", "a;b", "ü", "", "#x", "*", "~")
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def nasty(**changes: Any) -> Deployment:
    return made(prefill__flags=list(NASTY), prefill__env={"NASTY": "".join(NASTY)}, **changes)


@recipes
@pytest.mark.parametrize("to", sorted(RENDERERS))
def test_as_last_looked_at(path: Path, to: str) -> None:
    files = RENDERERS[to](load_recipe(path))
    folder = GOLDEN / path.stem / to
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == files.keys()
    for name, text in files.items():
        assert text == (folder / name).read_text(), name


@recipes
def test_files_are_written_and_scripts_can_be_run(path: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert run_render(path, "shell", tmp_path / "new" / "folder", said.append) == 0
    assert {Path(one).suffix for one in said} == {".sh", ".yaml"}
    assert all(Path(one).stat().st_mode & 0o100 for one in said if one.endswith(".sh"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output: .*file"):
        run_render(RECIPES[0], "shell", tmp_path / "file", print)


# -------------------------------------------------------------------------------------- shell


@recipes
def test_scripts_are_bash(path: Path) -> None:
    for name, text in RENDERERS["shell"](load_recipe(path)).items():
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_script_passes_every_word_as_it_is(tmp_path: Path) -> None:
    made = nasty()
    script = RENDERERS["shell"](made)["a.sh"]
    for program in ("vllm", "omni-proxy"):
        fake = tmp_path / program
        fake.write_text(
            "#!/usr/bin/env python3\nimport json, os, sys\n"
            "got = [sys.argv[1:], os.environ.get('NASTY')]\n"
            "open(f'{sys.argv[0]}-{os.getpid()}.json', 'w').write(json.dumps(got))\n"
            "import time; time.sleep(0.5)\n"
        )
        fake.chmod(0o755)
    (tmp_path / "a.sh").write_text(script)
    subprocess.run(["bash", str(tmp_path / "a.sh")], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=60)
    got = [json.loads(p.read_text()) for p in tmp_path.glob("vllm-*.json")]
    wanted = [[list(started(w).line[1:]), "".join(NASTY)] for w in made.on("a")]
    assert sorted(got) == sorted(wanted)


# ------------------------------------------------------------------------------------ systemd


def units(made: Deployment) -> dict[str, str]:
    return {Path(n).name: text for n, text in RENDERERS["systemd"](made).items() if n.endswith(".service")}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("which", ["nasty", *(p.stem for p in RECIPES)])
def test_units_are_valid(which: str, tmp_path: Path) -> None:
    made = nasty() if which == "nasty" else load_recipe(next(p for p in RECIPES if p.stem == which))
    for name, text in units(made).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_unit_passes_every_word_as_it_is() -> None:
    made = nasty()
    text = units(made)["two-prefill-0.service"].replace("\\\n", "")
    line = next(one for one in text.splitlines() if one.startswith("ExecStart=/usr/bin/env "))
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)[1:]]
    assert words == list(started(made.workers[0]).line)
    value = next(one for one in text.splitlines() if "NASTY=" in one).removeprefix("Environment=")
    assert shlex.split(value)[0].replace("%%", "%") == "NASTY=" + "".join(NASTY)


# ------------------------------------------------------------------------------------ compose


@pytest.fixture(scope="module")
def compose_schema() -> Any:
    """The specification's own schema, as the package check-jsonschema keeps it."""
    found = importlib.util.find_spec("check_jsonschema")
    if found is None or not found.submodule_search_locations:
        pytest.skip("pip install check-jsonschema")
    folder = Path(found.submodule_search_locations[0])
    return json.loads((folder / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())


@pytest.mark.parametrize("made", [*RECIPES, None], ids=lambda path: path.stem if path else "nasty")
def test_compose_files_keep_to_the_specification(made: Path | None, compose_schema: Any) -> None:
    files = RENDERERS["compose"](load_recipe(made) if made else nasty())
    composed = [text for name, text in files.items() if name.endswith("compose.yaml")]
    assert composed
    for text in composed:
        jsonschema.validate(yaml.safe_load(text), compose_schema)
    broken = yaml.safe_load(composed[0])
    next(iter(broken["services"].values()))["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, compose_schema)


def test_a_compose_file_passes_every_word_as_it_is() -> None:
    made = nasty()
    services = yaml.safe_load(RENDERERS["compose"](made)["a/compose.yaml"])["services"]
    worker = services["prefill-0"]
    assert [word.replace("$$", "$") for word in worker["entrypoint"]] == list(started(made.workers[0]).line)
    assert worker["environment"]["NASTY"].replace("$$", "$") == "".join(NASTY)
    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in worker["environment"], "a container counts its devices from 0"
    assert services["gateway"]["volumes"] == ["./gateway.yaml:/etc/omni-proxy/gateway.yaml:ro"]


def test_npus_are_devices_of_the_container() -> None:
    path = next(p for p in RECIPES if p.stem == "ascend-2p1d")
    worker = yaml.safe_load(RENDERERS["compose"](load_recipe(path))["p0/compose.yaml"])["services"]["prefill-0"]
    assert {"/dev/davinci0", "/dev/davinci15", "/dev/davinci_manager"} <= set(worker["devices"])
    assert "/models/DeepSeek-V3-W8A8:/models/DeepSeek-V3-W8A8:ro" in worker["volumes"]


# --------------------------------------------------------------------------------- kubernetes


def documents(made: Deployment) -> list[dict[str, Any]]:
    (text,) = RENDERERS["kubernetes"](made).values()
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.mark.parametrize("which", ["nasty", *(p.stem for p in RECIPES)])
def test_manifests_are_valid(which: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    made = nasty() if which == "nasty" else load_recipe(next(p for p in RECIPES if p.stem == which))
    for one in documents(made):
        validate.validate(one, "1.30", strict=True)


@recipes
def test_pods_are_found_as_the_workers_that_the_recipe_names(path: Path) -> None:
    made = load_recipe(path)
    found = []
    for one in documents(made):
        if one["kind"] != "Deployment" or "gateway" in one["metadata"]["name"]:
            continue
        for n in range(one["spec"]["replicas"]):
            meta = {**one["spec"]["template"]["metadata"], "name": f"{one['metadata']['name']}-{n}"}
            ready = [{"type": "Ready", "status": "True"}]
            seen = candidate({"metadata": meta, "status": {"podIP": f"10.0.0.{len(found)}", "conditions": ready}})
            assert seen is not None
            found.append(seen)
    workers, refused = vet("kubernetes", found)
    assert refused == []
    said = [(w.role, w.connector, w.max_seqs, w.dp_size) for w in workers]
    wanted = [(w.role, w.connector, w.max_seqs, w.dp_size) for w in made.gateway.workers]
    assert sorted(map(str, said)) == sorted(map(str, wanted))


@recipes
def test_the_gateway_in_the_cluster_finds_its_pods(path: Path) -> None:
    made = load_recipe(path)
    (config_map,) = (one for one in documents(made) if one["kind"] == "ConfigMap")
    config = parse(yaml.safe_load(config_map["data"]["config.yaml"]), "config.yaml")
    assert config.discovery.kubernetes is not None
    key, _, value = config.discovery.kubernetes.selector.partition("=")
    for one in documents(made):
        if one["kind"] == "Deployment" and "gateway" not in one["metadata"]["name"]:
            assert one["spec"]["template"]["metadata"]["labels"][key] == value


def test_equal_workers_are_replicas_and_others_are_not() -> None:
    counts = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in documents(made()) if one["kind"] == "Deployment"
    }
    assert counts == {"two-prefill": 2, "two-decode": 1, "two-gateway": 1}
    ascend = load_recipe(next(p for p in RECIPES if p.stem == "ascend-2p1d"))
    names = [one["metadata"]["name"] for one in documents(ascend) if one["kind"] == "Deployment"]
    assert {"deepseek-2p1d-prefill-0", "deepseek-2p1d-prefill-1"} <= set(names), "engine ids differ"


def test_pods_are_held_to_nodes_that_are_named() -> None:
    hosts = {**GOOD["hosts"], "b": {**GOOD["hosts"]["b"], "node": "gpu-7"}}
    found = next(one for one in documents(made(hosts=hosts)) if one["metadata"]["name"] == "two-decode")
    assert found["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "gpu-7"}


def test_a_variable_of_kubernetes_is_no_users_text() -> None:
    one = documents(nasty())[0]["spec"]["template"]["spec"]["containers"][0]
    assert "$$(id)" in one["command"]
    assert "$HOME" in one["command"]
    assert {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"} in one["env"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"connector": "vllm-p2p-nccl"}, "connector: pods cannot say their kv_address"),
        ({"decode__worker": {"backup": True}}, "decode.worker.backup: pods cannot say it of themselves (got True)"),
        ({"decode__worker": {"models": {"a": "b"}}}, "decode.worker.models: pods can only list names (got {'a': 'b'})"),
    ],
)
def test_what_pods_cannot_say_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        documents(made(**changes))
    assert str(caught.value).startswith(fault)


def test_mixed_workers_are_rendered_too() -> None:
    data = {**GOOD, "prefill": None, "decode": None, "mixed": GOOD["prefill"]}
    for render in RENDERERS.values():
        assert render(deployment(data, "r"))
    assert {w.role for w in deployment(data, "r").gateway.workers} == {Role.MIXED}
