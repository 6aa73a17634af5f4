"""The measurements: each puts one kind of load on a gateway and returns figures by column.

CPU is the gateway's own (user + system, whole process tree) over a window that lies inside the
load, divided by what passed in that window. After each measurement the load must have ended
without any error and both legs of every request must have reached the workers: a wrong gateway has
no figure.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from benchmarks.relay import procs
from benchmarks.relay.bench import DIRECT, Bench, Failed, Load, Mark, Subject, describe_errors
from benchmarks.relay.gateways import Gateway

Figures = dict[str, float]

_TOKENS_PER_REQUEST: Final = 2
_PACE_US: Final = 20_000
_MANY_RATE: Final = 1024 * 1e6 / _PACE_US
_BUSY: Final = 0.1
_OPENING_S: Final = 1.5  # for the last of them to have its first token
_RAMP: Final = 512  # streams opened per second
_SLOW_PACE_US: Final = 250_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, and what a request of the request and latency measurements asks for."""

    repetitions: int
    warm_s: float
    request_s: float
    token_s: float
    latency_s: float
    extra_rows: bool  # also rows and figures that are context, not what omni is judged by
    json: bool = True  # a whole answer, not a stream


FULL: Final = Plan(3, warm_s=0.7, request_s=2.5, token_s=3.0, latency_s=8.0, extra_rows=True)
QUICK: Final = Plan(1, warm_s=0.4, request_s=1.5, token_s=1.5, latency_s=3.0, extra_rows=False)


@dataclass
class Notes:
    """What a reader must know to trust the figures; one line each, printed under the table."""

    said: list[str] = field(default_factory=list)
    foreign: dict[str, float] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Notes a line once."""
        if line not in self.said:
            self.said.append(line)

    def share_core(self, row: str, share: float) -> None:
        """Notes how much of the gateway's core others used during one of a row's windows."""
        self.foreign[row] = max(share, self.foreign.get(row, 0.0))

    def lines(self) -> list[str]:
        """All notes, those on a busy machine as one."""
        busy = [f"{row} {share:.0%}" for row, share in self.foreign.items() if share > _BUSY]
        shared = f"not a quiet machine, others used the gateway's core up to: {', '.join(busy)}"
        return [*self.said, *([shared] if busy else [])]


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a load: what passed, what it cost, and who else worked on the gateway's cores."""

    start: Mark
    end: Mark
    cpu_ns: int
    harness_share: float
    foreign_share: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end.ns - self.start.ns) / 1e9

    @property
    def requests(self) -> int:
        """Requests that ended well in it."""
        return self.end.ok - self.start.ok

    @property
    def tokens(self) -> int:
        """Tokens that arrived in it."""
        return self.end.tokens - self.start.tokens

    def us_per(self, count: int) -> float:
        """CPU microseconds for each of so many things."""
        if self.end.errors:
            raise Failed(describe_errors(self.end))
        if not count:
            raise Failed("nothing came through in the measured window")
        return self.cpu_ns / 1000 / count


def watch(subject: Subject, load: Load, warm_s: float, seconds: float) -> Window:
    """Lets the load run in, then measures for so long."""
    time.sleep(warm_s)
    bench = subject.bench
    cpus = [] if subject.proc is None else bench.gateway_cpus
    start, busy, cpu = load.mark(), procs.busy_ns(cpus), subject.cpu_ns(load)
    harness = subject.harness_cpu_ns(load)
    time.sleep(seconds)
    end, spent = load.mark(), subject.cpu_ns(load) - cpu
    wall = end.ns - start.ns
    foreign = procs.busy_ns(cpus) - busy - spent if cpus else 0
    harness_share = (subject.harness_cpu_ns(load) - harness) / wall
    return Window(start, end, spent, harness_share, max(foreign, 0) / wall)


@dataclass(frozen=True, slots=True)
class Measurer:
    """Runs measurements by name on one started gateway."""

    subject: Subject
    plan: Plan
    notes: Notes
    row: str

    def request(self) -> Figures:
        """CPU per request, closed loop over 16 connections, for a short and a long prompt."""
        return {f"request_{kb}": self._requests(kb) for kb in (1, 32)}

    def _requests(self, kb: int) -> float:
        with self.loaded(connections=16, **self.short_requests(kb)) as load:
            window = watch(self.subject, load, self.plan.warm_s, self.plan.request_s)
        self._note(f"request, {kb} KB", window)
        return window.us_per(window.requests)

    def short_requests(self, kb: int) -> dict[str, float | bool]:
        """Load options: a prompt of so many KB, an answer of two tokens."""
        return {
            "prompt_bytes": kb * 1024,
            "max_tokens": _TOKENS_PER_REQUEST,
            "json": self.plan.json,
        }

    def unpaced(self) -> Figures:
        """CPU per token, 64 streams as fast as they come."""
        with self.loaded(connections=64, max_tokens=2000) as load:
            window = watch(self.subject, load, self.plan.warm_s, self.plan.token_s)
        self._note("64 streams unpaced", window)
        if window.start.streams < 48:  # a few are always between two of their requests
            left = f"only {window.start.streams} of 64 streams had a token yet, requests starve"
            self.notes.add(f"{self.row}, 64 streams unpaced: {left}")
        reads = max(1, window.end.reads - window.start.reads)
        return {
            "unpaced_64": window.us_per(window.tokens),
            "unpaced_bunch": window.tokens / reads,
        }

    def paced(self) -> Figures:
        """CPU per token, streams of one token per 20 ms."""
        return {f"paced_{streams}": self._paced(streams) for streams in (64, 256)}

    def _paced(self, streams: int) -> float:
        with self.loaded(**paced_streams(streams, self.plan.token_s)) as load:
            await_streams(load, streams, streams / _RAMP + _OPENING_S)
            window = watch(self.subject, load, 0.3, self.plan.token_s)
        self._note(f"{streams} paced streams", window, rested=True)
        return window.us_per(window.tokens)

    def latency(self) -> Figures:
        """Latency of requests that arrive at 100 a second whatever happens to the others."""
        with self.loaded(rate=100, **self.short_requests(1)) as load:
            window = watch(self.subject, load, self.plan.warm_s, self.plan.latency_s)
        self._note("100 requests/s", window, rested=True)
        seen = window.end.latency_ms
        return {"latency_p50": seen.p50, "latency_p99": seen.p99}

    def rss(self) -> Figures:
        """Memory with 0, 256 and 1,024 open streams of four tokens a second each."""
        if self.subject.proc is None:
            return {}
        figures = {"rss_0": self.subject.memory_mb()}
        with self._slow_streams(256) as first:
            figures["rss_256"] = self._memory_at(first, 256)
            with self._slow_streams(768) as second:
                figures["rss_1024"] = self._memory_at(second, 768)
        self._await_closed_streams()
        return figures

    def _slow_streams(self, streams: int) -> Load:
        options = {"max_tokens": 60, "interval_us": _SLOW_PACE_US, "ramp": _RAMP}
        return self.subject.load(connections=streams, each=1, **options)

    def _memory_at(self, load: Load, streams: int) -> float:
        await_streams(load, streams, 8)
        time.sleep(1.0)
        return self.subject.memory_mb()

    def _await_closed_streams(self) -> None:
        """The clients have left without waiting; a good gateway leaves its workers as well."""
        begun = time.monotonic()
        while (left := self.subject.bench.stats().decode.open) and time.monotonic() < begun + 20:
            if time.monotonic() > begun + 3:
                self.notes.add(f"{self.row}: streams went on on D 3 s after their clients had left")
            time.sleep(0.25)
        if left:
            raise Failed(f"{left} streams still open on D 20 s after their clients had left")

    @contextmanager
    def loaded(self, **options: float | bool) -> Iterator[Load]:
        """A load that must end in good order, both legs of each of its requests having run."""
        before = self.subject.bench.stats()
        with self.subject.load(**options) as load:
            yield load
            last = load.drain()
        if wrong := self.subject.wrong_legs(before, last.ok):
            raise Failed(wrong)

    def _note(self, what: str, window: Window, *, rested: bool = False) -> None:
        """Says what makes a figure doubtful; `rested` loads must leave the harness CPU to spare."""
        self.notes.share_core(self.row, window.foreign_share)
        if rested and window.harness_share > 0.85:
            self.notes.add(f"{self.row}, {what}: mocks and load were short of CPU themselves")


def await_streams(load: Load, streams: int, timeout_s: float) -> None:
    """Returns when so many streams have their first token; fewer at a time would cost others."""
    deadline = time.monotonic() + timeout_s
    while (mark := load.mark()).streams < streams:
        if mark.errors:
            raise Failed(describe_errors(mark))
        if time.monotonic() > deadline:
            raise Failed(f"only {mark.streams} of {streams} streams opened in {timeout_s:.1f} s")
        time.sleep(0.05)


def paced_streams(streams: int, seconds: float) -> dict[str, float | bool]:
    """Load options: one stream per connection, long enough for a window of so many seconds."""
    tokens = int((streams / _RAMP + _OPENING_S + seconds + 0.5) * 1e6 / _PACE_US)
    return {
        "connections": streams,
        "each": 1,
        "ramp": _RAMP,
        "max_tokens": tokens,
        "interval_us": _PACE_US,
    }


MEASUREMENTS: Final[Mapping[str, Callable[[Measurer], Figures]]] = {
    "rss": Measurer.rss,  # first: a fresh process
    "request": Measurer.request,
    "unpaced": Measurer.unpaced,
    "paced": Measurer.paced,
    "latency": Measurer.latency,
}


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the two-process measurement uses, and whether the load has one to itself."""

    one: tuple[int, ...]
    two: tuple[int, ...]
    load_apart: bool


def two_cores(gateway_cpus: Sequence[int], load_cpus: Sequence[int], cpus: Sequence[int]) -> Cores:
    """A second core for the gateway: a free one if there is, otherwise the load's own."""
    free = [cpu for cpu in cpus if cpu not in gateway_cpus and cpu not in load_cpus]
    second = free[0] if free else load_cpus[0]
    return Cores((gateway_cpus[0],), (gateway_cpus[0], second), bool(free))


def processes(bench: Bench, gateway: Gateway | None, plan: Plan, notes: Notes, cores: Cores) -> Figures:
    """Two processes (or cores, for gateways of threads) against one, then 1,024 paced streams."""
    row = DIRECT if gateway is None else gateway.row
    if gateway is None:
        with bench.subject(None) as subject:
            alone = _many_streams(Measurer(subject, plan, notes, row))
        if alone["many_rate"] < 0.95 * _MANY_RATE:
            notes.add("1,024 streams: mocks and load alone did not keep the pace, no row means much")
        return alone
    figures: Figures = {}
    with bench.subject(gateway, cpus=cores.one) as subject:
        figures["rps_1"], figures["cost_1"] = _saturate(Measurer(subject, plan, notes, row))
    with bench.subject(gateway, cpus=cores.two, processes=2) as subject:
        figures["rps_2"], figures["cost_2"] = _saturate(Measurer(subject, plan, notes, row))
        figures |= _many_streams(Measurer(subject, plan, notes, row))
    figures["rps_ratio"] = figures["rps_2"] / figures["rps_1"]
    figures["rps_scale"] = 2 * figures["cost_1"] / figures["cost_2"]
    return figures


def _saturate(measurer: Measurer) -> tuple[float, float]:
    """Requests per second under 64 connections that never pause, and CPU for each."""
    with measurer.loaded(connections=64, **measurer.short_requests(1)) as load:
        window = watch(measurer.subject, load, measurer.plan.warm_s, measurer.plan.request_s)
    return window.requests / window.seconds, window.us_per(window.requests)


def _many_streams(measurer: Measurer) -> Figures:
    """Delay of each token with 1,024 paced streams, and TTFT of requests that come on top."""
    seconds, subject = measurer.plan.token_s + 1, measurer.subject
    with (
        subject.load(**paced_streams(1024, seconds + 1)) as streams,
        subject.load(rate=50, max_tokens=4) as newcomers,
    ):
        time.sleep(1024 / _RAMP + 1.0)
        newcomers.mark()
        window, fresh = watch(subject, streams, 0, seconds), newcomers.mark()
        newcomers.drain()
        streams.drain()
    if window.start.streams < 1024:
        measurer.notes.add(f"{measurer.row}: {window.start.streams} of 1,024 streams were open")
    return {
        "many_rate": window.tokens / window.seconds,
        "many_token_p50": window.end.token_ms.p50,
        "many_token_p99": window.end.token_ms.p99,
        "many_ttft_p99": fresh.ttft_ms.p99,
    }
