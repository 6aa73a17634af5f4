"""An engine never outlives its guard, even one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_proxy.ray import guard

WAIT_S = 30.0


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells the engine on Linux only")
def test_a_killed_guard_takes_its_engine_with_it() -> None:
    read, write = os.pipe()
    engine = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    source = Path(guard.__file__).read_text()
    command = [sys.executable, "-c", source, str(read), sys.executable, "-c", engine]
    with subprocess.Popen(command, pass_fds=(read,), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    os.close(read)
    os.close(write)
    deadline = time.monotonic() + WAIT_S
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
