"""Child processes: start pinned, read what they used from /proc, end by pid.

Knows nothing of gateways. CPU time is read from each process's CPU clock (what utime + stime are
rounded from, in nanoseconds) plus the time of children that have been waited for.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_GRACE_S = 2.0
_LISTEN = "0A"
"""The state of a socket that listens, as `/proc/net/tcp` says it (include/net/tcp_states.h)."""


def parse_stat(text: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; the name before may hold spaces and brackets."""
    return text[text.rindex(")") + 2 :].split()


def _stat(pid: int) -> list[str] | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return None


def tree(root: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """CPU time, user and system, of these processes and of their reaped children."""
    return sum(_cpu_ns(pid) for pid in pids)


def _cpu_ns(pid: int) -> int:
    fields = _stat(pid)
    if fields is None:
        return 0
    reaped = (int(fields[13]) + int(fields[14])) * _TICK_NS
    try:
        return time.clock_gettime_ns(process_clock(pid)) + reaped
    except OSError:
        return (int(fields[11]) + int(fields[12])) * _TICK_NS + reaped


def process_clock(pid: int) -> int:
    """Linux's id of another process's CPU clock (clock_getcpuclockid)."""
    return (~pid << 3) | 2


def memory_mb(pids: Sequence[int]) -> float:
    """RSS of one process; of several the sum of their PSS, so that shared pages count once."""
    field = "Rss:" if len(pids) == 1 else "Pss:"
    return sum(_rollup_kb(pid, field) for pid in pids) / 1024


def _rollup_kb(pid: int, field: str) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return parse_rollup_kb(text, field)


def parse_rollup_kb(text: str, field: str) -> int:
    """One field of smaps_rollup, in kB; 0 if absent."""
    for line in text.splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def busy_ns(cpus: Iterable[int]) -> int:
    """How long these cores have worked for anyone (resolution: a scheduler tick)."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    return sum(
        parse_busy_ticks(line) * _TICK_NS
        for line in Path("/proc/stat").read_text().splitlines()
        if line.split(" ", 1)[0] in wanted
    )


def parse_busy_ticks(line: str) -> int:
    """Ticks of a cpu line of /proc/stat that were neither idle nor waiting for disks."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return user + nice + system + irq + softirq + steal


def listeners(table: str, port: int) -> int:
    """How many sockets listen on a port, by the text of `/proc/net/tcp`."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return sum(row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port for row in rows)


class Proc:
    """A child pinned to some cores; dies with this process; `stop` leaves none of its tree."""

    def __init__(self, command: Sequence[str], cpus: Sequence[int], log: Path, *, pipes: bool = False) -> None:
        pinned = ["taskset", "-c", ",".join(map(str, cpus)), *command]
        pipe = subprocess.PIPE if pipes else None
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *pinned],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches the harness alone, which then ends all
            )
        self.log = log
        self.stdin, self.stdout = self._child.stdin, self._child.stdout
        self._pids = [self._child.pid]

    def alive(self) -> bool:
        """Whether the first process of the tree still runs."""
        return self._child.poll() is None

    def pids(self) -> list[int]:
        """The tree as it is now, remembered for `stop`."""
        self._pids = tree(self._child.pid)
        return self._pids

    def stop(self) -> None:
        """Ends the whole tree by pid: asks, waits a little, then kills what is left."""
        started = {pid: _start_time(pid) for pid in {*self._pids, *self.pids()}}
        if self.alive():
            self._child.terminate()
        self._await_end(started)
        for pid in self._left(started):
            _kill(pid)
        self._await_end(started)
        self._child.wait()
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()

    def _await_end(self, started: dict[int, str | None]) -> None:
        deadline = time.monotonic() + _GRACE_S
        while self._left(started) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _left(self, started: dict[int, str | None]) -> list[int]:
        self._child.poll()
        return [pid for pid, at in started.items() if at is not None and _start_time(pid) == at]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _start_time(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
