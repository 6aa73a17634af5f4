"""Servers as processes of their own: started, waited for, killed and ended by their pids; what they print is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

START_LIMIT_S = 600.0
"""On a machine that does other things as well."""


class Server:
    """One server process. `start` returns at once; `ready` waits."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        self._command = command
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            # In a group of its own: engines have children, which must end with them.
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def ready(self, path: str = "/health", limit_s: float = START_LIMIT_S) -> None:
        """Wait until it answers 200. Raises AssertionError with the end of its log if it ends or takes too long."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            assert self.alive, f"{self.name} ended: {self._tail()}"
            with contextlib.suppress(httpx.HTTPError):
                if self.get(path).status_code == 200:
                    return
            time.sleep(0.25)
        raise AssertionError(f"{self.name} is not ready: {self._tail()}")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it and its children without a word."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """End it as its operator would; whatever is left after 30 s is killed."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, trust_env=False)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(self.url + path, json=body, headers=named, timeout=300, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all lines of a metric that have these labels; 0 where there is none."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.partition("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._process.wait(30)

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Gateway(Server):
    """`omni-proxy serve` before some workers."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        port = free_port()
        file = folder / f"{name}.yaml"
        whole = {"listen": {"port": port}, "health": {"interval_s": 0.5, "timeout_s": 20.0}, **config}
        file.write_text(yaml.safe_dump(whole))
        super().__init__(name, [sys.executable, "-m", "omni_proxy", "serve", "-c", str(file)], port, folder, {})

    def workers(self) -> dict[str, Any]:
        """What it knows of its workers, by name."""
        return {w["name"]: w for w in self.get("/omni/workers").json()["workers"]}

    def all_up(self) -> None:
        """Wait until it uses all of them."""
        until(lambda: all(w["state"] == "up" for w in self.workers().values()), START_LIMIT_S)

    def timeline(self, answer: httpx.Response) -> Any:
        return self.get(f"/omni/requests/{answer.headers['x-request-id']}").json()


@contextlib.contextmanager
def gateway(name: str, folder: Path, config: dict[str, Any]) -> Iterator[Gateway]:
    """A gateway, once all its workers are up."""
    started = Gateway(name, folder, config)
    started.start()
    try:
        started.ready("/health", 60)
        started.all_up()
        yield started
    finally:
        started.stop()


def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until something is so. Raises AssertionError when it does not become so in time."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not so within {limit_s:g} s"
        time.sleep(0.05)
