"""One gateway over the mock workers, and the load on it: what every measurement is made of.

`Bench` owns the tools and the mock workers of a run, `Subject` is a started gateway (or none: the
load then goes straight to a worker), `Load` is a running load generator that is asked for marks.
"""

import http.client
import json
import random
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.relay import procs
from benchmarks.relay.gateways import Gateway, Place

_START_TIMEOUT_S: Final = 45.0
_ANSWER_TIMEOUT_S: Final = 20.0
_STREAM_END_TIMEOUT_S: Final = 15.0
DIRECT: Final = "direct (CPU: mocks + load)"


class Failed(Exception):
    """A measurement has no result; the message is the reason that the report prints."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one kind of sample since the last mark, in milliseconds."""

    n: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Mark:
    """What the load generator had seen at one instant: totals, and percentiles since the last."""

    ns: int
    ok: int
    tokens: int
    reads: int
    in_flight: int
    streams: int
    errors: int
    error_kinds: dict[str, int]
    latency_ms: Percentiles
    ttft_ms: Percentiles
    token_ms: Percentiles


def parse_mark(line: str) -> Mark:
    """Reads one line of the load generator."""
    fields: dict[str, Any] = json.loads(line)
    for name in ("latency_ms", "ttft_ms", "token_ms"):
        fields[name] = Percentiles(**fields[name])
    return Mark(**fields)


class Load(procs.Proc):
    """A running load generator."""

    def mark(self) -> Mark:
        """Totals now, and percentiles since the last mark."""
        return self._ask("mark", _ANSWER_TIMEOUT_S)

    def drain(self) -> Mark:
        """Begins nothing new, waits until all that runs has ended; raises if anything was wrong."""
        last = self._ask("stop", _STREAM_END_TIMEOUT_S)
        if last.errors:
            raise Failed(describe_errors(last))
        return last

    def _ask(self, command: str, timeout_s: float) -> Mark:
        assert self.stdin is not None
        assert self.stdout is not None
        try:
            self.stdin.write(command.encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError as exc:
            raise Failed("the load generator has died") from exc
        if not select.select([self.stdout], [], [], timeout_s)[0]:
            raise Failed(f"requests still unanswered after {timeout_s:.0f} s")
        line = self.stdout.readline()
        if not line:
            raise Failed("the load generator has died")
        return parse_mark(line.decode())


def describe_errors(mark: Mark) -> str:
    """`3 errors (status 503: 3)`."""
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(mark.error_kinds.items()))
    return f"{mark.errors} errors ({kinds})"


@dataclass(frozen=True, slots=True)
class Legs:
    """Requests that reached a role's workers, those that carried a handoff, streams open now."""

    requests: int
    handoffs: int
    open: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What the mock workers have counted."""

    prefill: Legs
    decode: Legs


class Bench:
    """Tools, cores, ports and the mock workers of one run."""

    def __init__(self, mock: Path, load: Path, gateway_cpus: Sequence[int], load_cpus: Sequence[int]) -> None:
        self.gateway_cpus, self.load_cpus = tuple(gateway_cpus), tuple(load_cpus)
        self._mock_tool, self._load_tool = mock, load
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-")))
            self.folder.chmod(0o711)  # nginx's workers are another user
            ports = free_ports(4)
            self.prefill, self.decode = ports[:2], ports[2:]
            roles = [",".join(map(str, role)) for role in (self.prefill, self.decode)]
            command = [str(self._mock_tool), *roles]
            self.mock = stack.enter_context(procs.Proc(command, self.load_cpus, self.folder / "mock.log"))
            wait_for_port(self.decode[-1], self.mock)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextmanager
    def subject(self, gateway: Gateway | None, *, cpus: Sequence[int] = (), processes: int = 1) -> Iterator["Subject"]:
        """Starts a gateway and waits until it serves; None: the workers themselves."""
        if gateway is None:
            yield Subject(self, None, None, self.decode[0])
            return
        port, metrics_port = free_ports(2)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        folder.chmod(0o711)
        place = Place(port, metrics_port, self.prefill, self.decode, folder, processes)
        command, pinned = gateway.command(place), cpus or self.gateway_cpus
        with procs.Proc(command, pinned, folder / "log") as proc:
            subject = Subject(self, gateway, proc, port)
            # Connections are divided among those that listen when they come.
            subject.wait_until_ready(processes if gateway.family == "omni" else 1)
            yield subject

    def load(self, port: int, **options: float | bool) -> Load:
        """Starts a load generator; options are those of load.cpp, `_` for `-`."""
        args = ["--port", str(port)]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                args.append(flag)
            elif value is not False:
                args += [flag, str(value)]
        command = [str(self._load_tool), *args]
        return Load(command, self.load_cpus, self.folder / "load.log", pipes=True)

    def stats(self) -> Stats:
        """Asks the mock workers for their counters."""
        connection = http.client.HTTPConnection("127.0.0.1", self.decode[0], timeout=5)
        try:
            connection.request("GET", "/mock/stats")
            fields = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return Stats(Legs(**fields["prefill"]), Legs(**fields["decode"]))


@dataclass(frozen=True, slots=True)
class Subject:
    """What is being measured: a started gateway, or (gateway None) mocks and load themselves."""

    bench: Bench
    gateway: Gateway | None
    proc: procs.Proc | None
    port: int

    def load(self, **options: float | bool) -> Load:
        """Starts a load generator on this gateway."""
        return self.bench.load(self.port, **options)

    def cpu_ns(self, load: Load) -> int:
        """CPU time so far of the gateway's tree; of mocks and load where there is no gateway."""
        if self.proc is None:
            return self.harness_cpu_ns(load)
        return procs.cpu_ns(self.proc.pids())

    def harness_cpu_ns(self, load: Load) -> int:
        """CPU time so far of the mock workers and this load generator."""
        return procs.cpu_ns([*self.bench.mock.pids(), *load.pids()])

    def memory_mb(self) -> float:
        """Memory of the gateway's tree."""
        assert self.proc is not None
        return procs.memory_mb(self.proc.pids())

    def wait_until_ready(self, listeners: int) -> None:
        """Returns when whole requests with both legs pass, several times in a row, and so many sockets listen."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        good = 0
        while good < 4 or procs.listeners(Path("/proc/net/tcp").read_text(), self.port) < listeners:
            if self.proc is not None and not self.proc.alive():
                raise Failed(f"ended while starting: {_last_line(self.proc.log)}")
            if time.monotonic() > deadline:
                raise Failed(f"not ready after {_START_TIMEOUT_S:.0f} s: {self._probe()}")
            good = good + 1 if self._probe() == "" else 0
            if not good:
                time.sleep(0.1)

    def _probe(self) -> str:
        before = self.bench.stats()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
        try:
            text = json.dumps({**body, "max_tokens": 2, "stream": False})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", text, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as exc:
            return repr(exc)
        finally:
            connection.close()
        if response.status != 200 or b" 00001@" not in answer:
            return f"status {response.status}: {answer[:200].decode(errors='replace')}"
        return self.wrong_legs(before, 1)

    def wrong_legs(self, before: Stats, requests: int) -> str:
        """What is wrong with the legs that the workers saw for so many requests; empty if nothing.

        The parallel protocol may answer the client before P has its leg, hence the short wait.
        """
        handed = requests if self.gateway is not None and self.gateway.pd else 0
        for wait_s in (0.0, 0.05, 0.2):
            time.sleep(wait_s)
            after = self.bench.stats()
            seen = (
                after.decode.requests - before.decode.requests,
                after.decode.handoffs - before.decode.handoffs,
                after.prefill.requests - before.prefill.requests,
                after.prefill.handoffs - before.prefill.handoffs,
            )
            if seen == (requests, handed, handed, handed):
                return ""
        return (
            f"{requests} requests, but {seen[0]} reached D ({seen[1]} with a handoff) "
            f"and {seen[2]} reached P ({seen[3]} asking for one)"
        )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, outside the range of outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(18000, 30000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def wait_for_port(port: int, proc: procs.Proc) -> None:
    """Returns when someone accepts on the port."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while time.monotonic() < deadline and proc.alive():
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise Failed(f"the mock workers do not start: {_last_line(proc.log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
