"""Stands between a worker's actor and its engine, so that the engine never outlives the actor.

Run as `python -c SOURCE FD COMMAND...`; only the standard library, because the node may have nothing else. FD is a pipe
that closes when the actor's process is gone, however it went. Then, and on SIGTERM, the engine's whole process group is
ended: politely, and after ten seconds not. Ray kills what an actor has started when it ends, the guard too: then the
system tells the engine.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the command, wait for its end or that of the actor; exit as it did."""
    fd, command = int(sys.argv[1]), sys.argv[2:]
    tie = _end_with_us if sys.platform == "linux" else None
    child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=tie)
    ending = threading.Event()

    def end() -> None:
        if ending.is_set():
            return
        ending.set()
        _signal_group(child.pid, signal.SIGTERM)
        threading.Timer(GRACE_S, _signal_group, (child.pid, signal.SIGKILL)).start()

    def watch() -> None:
        while os.read(fd, 1):
            pass
        end()

    signal.signal(signal.SIGTERM, lambda *_: end())
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # what it started and left behind
    os._exit(code if code >= 0 else 128 - code)


def _end_with_us() -> None:
    """In the child: a SIGTERM when the guard is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
