"""The cluster of examples/several-models.yaml, started by the commands in its own comment, on free ports."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
START_LIMIT_S = 60.0


class Cluster(NamedTuple):
    """A gateway that is ready, and what workers it has."""

    url: str
    config: str
    """The text of its config, with the ports that were free."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(*commands: Sequence[str]) -> Iterator[None]:
    """Processes of these commands, ended by SIGTERM."""
    processes = [subprocess.Popen([sys.executable, *command], cwd=ROOT) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            assert process.wait(timeout=30) == 0


def when_ready(url: str) -> str:
    give_up = time.monotonic() + START_LIMIT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready").status_code == 200 and len(httpx.get(f"{url}/v1/models").json()["data"]) > 1:
                return url
        assert time.monotonic() < give_up, f"{url} is not ready"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    text = (EXAMPLES / "several-models.yaml").read_text(encoding="utf-8")
    ports = {port: str(free_port()) for port in sorted(set(re.findall(r"\b8\d\d\d\b", text)))}
    config = re.sub(r"\b8\d\d\d\b", lambda match: ports[match[0]], text)
    path = tmp_path_factory.mktemp("examples") / "several-models.yaml"
    path.write_text(config, encoding="utf-8")
    lines = re.findall(r"^#   omni-proxy (.*)$", config, re.M)
    commands = [shlex.split(line.replace("examples/several-models.yaml", str(path))) for line in lines]
    assert len(commands) == 4
    with running(*(["-m", "omni_proxy", *command] for command in commands)):
        yield Cluster(when_ready(f"http://127.0.0.1:{ports['8000']}"), config)


@pytest.fixture
def gateway(tmp_path: Path) -> Callable[[str, Sequence[str]], contextlib.AbstractContextManager[str]]:
    """Another gateway with this config (listening on port 0's stand-in), started by this program."""

    @contextlib.contextmanager
    def start(config: str, program: Sequence[str]) -> Iterator[str]:
        path = tmp_path / "config.yaml"
        path.write_text(config, encoding="utf-8")
        listen = re.search(r"^listen: .*port: (\d+)", config, re.M)
        assert listen is not None
        with running([*program, str(path)]):
            yield when_ready(f"http://127.0.0.1:{listen[1]}")

    return start
