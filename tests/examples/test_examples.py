"""Every file of examples/ does what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.examples.conftest import EXAMPLES, ROOT, Cluster, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run(*command: str) -> str:
    """What an example prints; it has to succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_told_of_and_tested() -> None:
    told = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8") + (Path(__file__).parent / "conftest.py").read_text("utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh", ".yaml"):
            assert f"]({path.name})" in told
            assert f'"{path.name}"' in tests


def test_the_official_client_streams(cluster: Cluster) -> None:
    said = run(sys.executable, str(EXAMPLES / "openai_streaming.py"), cluster.url, "default")
    assert len(said.splitlines()[0].split()) >= 20
    assert "PREFILL_RUNNING" in said
    assert "DECODE_RUNNING" in said


def test_curl(cluster: Cluster) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    said = run(str(EXAMPLES / "ask.sh"), cluster.url)
    assert said.count("data: ") > 8
    assert "data: [DONE]" in said
    assert '"id":"my-request-1"' in said.splitlines()[-1].replace('": ', '":')


def test_each_model_has_its_own_workers(cluster: Cluster) -> None:
    def modes(model: str) -> str:
        question = {"model": model, "prompt": "w1 w2 w3", "max_tokens": 2}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=question).raise_for_status()
        mode: str = httpx.get(f"{cluster.url}/omni/requests/{answer.headers['x-request-id']}").json()["mode"]
        return mode

    assert [modes(model) for model in ("large", "default", "small")] == ["sequential", "sequential", "aggregated"]
    unknown = httpx.post(f"{cluster.url}/v1/completions", json={"model": "huge", "prompt": "x"})
    assert unknown.status_code == 404


def test_a_cluster_is_planned() -> None:
    said = run(str(EXAMPLES / "plan_cluster.sh"))
    assert "goodput" in said
    assert re.search(r"\dP \+ \dD", said)


def test_a_recording_replays_to_the_same(tmp_path: Path) -> None:
    assert "qual" in run(str(EXAMPLES / "replay_log.sh"), str(tmp_path / "log")).splitlines()[-1]


def test_an_order_of_ones_own_is_compared() -> None:
    said = run(sys.executable, str(EXAMPLES / "own_policy.py"))
    assert {"longest-first", "weighted", "fcfs"} <= set(said.split())


def test_a_connector_of_ones_own_hands_over(
    cluster: Cluster, gateway: Callable[[str, Sequence[str]], AbstractContextManager[str]]
) -> None:
    config = re.sub(r"^(listen: .*port: )\d+", rf"\g<1>{free_port()}", cluster.config, flags=re.M)
    config = config.replace("connector: omni,", "connector: lmcache, checks: false,")
    with gateway(config, [str(EXAMPLES / "own_connector.py")]) as url:
        question = {"model": "large", "prompt": " ".join(f"w{i}" for i in range(80)), "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=question).raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert 'omni_handoffs_total{result="done"} 1.0' in httpx.get(f"{url}/metrics").text


def test_a_live_gateways_recording_replays_to_the_same(
    cluster: Cluster, gateway: Callable[[str, Sequence[str]], AbstractContextManager[str]], tmp_path: Path
) -> None:
    config = re.sub(r"^(listen: .*port: )\d+", rf"\g<1>{free_port()}", cluster.config, flags=re.M)
    log = tmp_path / "events"
    with gateway(f"{config}record: {log}\n", ["-m", "omni_proxy", "serve", "-c"]) as url:
        question = {"model": "large", "prompt": "w1 w2 w3", "max_tokens": 3}
        httpx.post(f"{url}/v1/completions", json=question).raise_for_status()
    assert "qual" in run(sys.executable, "-m", "omni_proxy", "replay", str(log)).splitlines()[-1]
