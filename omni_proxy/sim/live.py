"""Workers and a gateway as processes on this machine, for comparing the simulator with what it simulates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml

from omni_proxy.config import ConfigError

START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 15.0
_POLL_S: Final = 0.1


class _Ready(msgspec.Struct):
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What to start. `worker_arguments` go behind `omni-proxy worker --role ROLE`."""

    prefill: int
    decode: int
    worker_arguments: tuple[str, ...]
    gateway: Mapping[str, object]
    """Settings of the gateway besides its workers and its port."""


@dataclass(frozen=True, slots=True)
class Live:
    """A running cluster."""

    url: str
    workers: tuple[tuple[str, str, str], ...]
    """(name, role, URL)."""
    worker_pids: tuple[int, ...]
    """In the workers' order."""
    gateway_pid: int


@contextmanager
def cluster(plan: LivePlan) -> Iterator[Live]:
    """Start everything, wait until it serves, and end it. Raises ConfigError with what a process said last."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-live-")))
        roles = [(f"prefill-{i}", "prefill") for i in range(plan.prefill)]
        roles += [(f"decode-{i}", "decode") for i in range(plan.decode)]
        started = [
            (name, role, _start_worker(stack, folder, name, role, plan.worker_arguments)) for name, role in roles
        ]
        workers = tuple((name, role, _await_worker(name, fd, folder)) for name, role, (fd, _) in started)
        url, gateway = _start_gateway(stack, folder, workers, plan.gateway)
        yield Live(url, workers, tuple(pid for _, _, (_, pid) in started), gateway)


def _start_worker(stack: ExitStack, folder: Path, name: str, role: str, arguments: Sequence[str]) -> tuple[int, int]:
    """The pipe on which the worker says that it serves, and its process."""
    read, write = os.pipe()
    stack.callback(os.close, read)
    command = ["worker", "--role", role, *arguments, f"--ready-fd={write}"]
    try:
        process = _spawn(stack, folder / f"{name}.log", command, (write,))
    finally:
        os.close(write)
    return read, process.pid


def _await_worker(name: str, fd: int, folder: Path) -> str:
    with os.fdopen(os.dup(fd), "rb") as pipe:
        line = pipe.readline()
    if not line:
        raise ConfigError(f"{name} did not start: {_last_line(folder / f'{name}.log')}")
    ready = msgspec.json.decode(line, type=_Ready)
    return f"http://{ready.host}:{ready.port}"


def _start_gateway(
    stack: ExitStack, folder: Path, workers: Sequence[tuple[str, str, str]], settings: Mapping[str, object]
) -> tuple[str, int]:
    """Its URL and its process."""
    port = _free_port()
    members = [{"name": name, "role": role, "url": url, "connector": "omni"} for name, role, url in workers]
    config = {"listen": {"host": "127.0.0.1", "port": port}, **settings, "workers": members}
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    log = folder / "gateway.log"
    process = _spawn(stack, log, ["serve", "-c", str(path), "--log-level", "warning"], ())
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_LIMIT_S
    while not _serves(url, len(workers)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"the gateway does not serve: {_last_line(log)}")
        time.sleep(_POLL_S)
    return url, process.pid


def _spawn(stack: ExitStack, log: Path, arguments: Sequence[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    out = stack.enter_context(log.open("wb"))
    command = [sys.executable, "-m", "omni_proxy", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=fds)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _serves(url: str, workers: int) -> bool:
    """Are all workers up?"""
    try:
        with urllib.request.urlopen(f"{url}/omni/workers", timeout=2) as answer:
            found = msgspec.json.decode(answer.read())
    except (urllib.error.URLError, OSError, msgspec.MsgspecError):
        return False
    return bool(sum(worker["state"] == "up" for worker in found["workers"]) == workers)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
