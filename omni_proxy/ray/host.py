"""The actor that runs one worker's engine on a node of the cluster.

Sent to the node as it is: only Ray and the standard library, so that a node needs the engine and nothing of ours. All
methods block; the actor is a threaded one. It ends itself when nobody has asked after it for `lease_s`: its gateway
has died with the machine it ran on.
"""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from typing import Any

import ray

_KEPT_LINES = 20
_LOOK_S = 0.1


class Host:
    """One engine process and what is known of it."""

    def __init__(self, guard: str, lease_s: float) -> None:
        self._guard = guard
        self._address = ray.util.get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()
        self._lease_s = lease_s
        self._heard = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: dict[str, Any] | None = None
        self._pipe = -1
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()

    def beat(self) -> None:
        """Somebody still wants this worker."""
        self._heard = time.monotonic()

    def serving(self) -> "dict[str, Any] | None":
        """What `start` told, while the engine runs."""
        runs = self._process is not None and self._process.poll() is None
        return self._ready if runs else None

    def reserve(self, ports: "list[int]") -> "tuple[str, list[int]]":
        """This node's address, and for each number the first of as many free ports in a row."""
        self.beat()
        return self._address, _free(self._address, ports)

    def start(
        self, command: "list[str]", env: "dict[str, str]", port: int, limit_s: float, entry: Any
    ) -> "dict[str, Any]":
        """Start the engine and wait until it answers `/health`. `fault` in the answer says why it does not.

        `entry` is kept for whoever asks later what `serving`.
        """
        self._heard = time.monotonic() + limit_s
        read, self._pipe = os.pipe()
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", self._guard, str(read), *_here(command[0]), *command[1:]],
                env={**os.environ, **env},
                pass_fds=(read,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        finally:
            os.close(read)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(self._address, port):
                self._ready = {"pid": process.pid, "node": self._node, "entry": entry}
                self.beat()
                return self._ready
            time.sleep(_LOOK_S)
        self.beat()
        if process.poll() is None:
            self.stop()
            return {"fault": f"does not answer after {limit_s:g} s"}
        return {"fault": self._why(process.returncode)}

    def wait(self) -> str:
        """Until the engine ends: why it did."""
        assert self._process is not None
        return self._why(self._process.wait())

    def stop(self) -> None:
        """End the engine; returns when it has."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._process is not None:
            self._process.wait()

    def _end_when_forgotten(self) -> None:
        while time.monotonic() - self._heard < self._lease_s:
            time.sleep(min(1.0, self._lease_s / 4))
        os._exit(0)  # the guard ends the engine

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._lines.append(line)
            sys.stderr.write(line + "\n")  # into the actor's log on its node

    def _why(self, code: int) -> str:
        time.sleep(_LOOK_S)  # for its last line to be read
        how = f"ended by signal {code - 128}" if code > 128 else f"ended with code {code}"
        return f"{how}: {self._lines[-1]}" if self._lines and 0 < code <= 128 else how


def _here(program: str) -> "list[str]":
    """Python, and what is installed beside it, as this node has them."""
    return {"omni-proxy": [sys.executable, "-m", "omni_proxy"], "python": [sys.executable]}.get(program, [program])


def _answers(address: str, port: int) -> bool:
    host = f"[{address}]" if ":" in address else address
    try:
        # Straight to the engine, whatever proxy the node's environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{host}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _free(address: str, counts: "list[int]") -> "list[int]":
    """For each count, the first of so many ports in a row on which nobody listens."""
    held: list[socket.socket] = []
    found = []
    try:
        for count in counts:
            run = _run(address, count)
            held += run
            found.append(run[0].getsockname()[1])
        return found
    finally:
        for one in held:
            one.close()


def _run(address: str, count: int) -> "list[socket.socket]":
    while True:
        run: list[socket.socket] = []
        try:
            run.append(_bound(address, 0))
            first = run[0].getsockname()[1]
            for step in range(1, count):
                run.append(_bound(address, first + step))
            return run
        except (OSError, OverflowError):
            for one in run:
                one.close()


def _bound(address: str, port: int) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        one.bind((address, port))
    except (OSError, OverflowError):
        one.close()
        raise
    return one
