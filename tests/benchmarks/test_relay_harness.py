"""The gateway comparison: its pure pieces, and mocks and load against each other for a second."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from benchmarks.relay import build, procs, report
from benchmarks.relay.__main__ import parse_args
from benchmarks.relay.bench import DIRECT, Bench, Failed, describe_errors, free_ports, parse_mark
from benchmarks.relay.gateways import GATEWAYS, Place, nginx_config
from benchmarks.relay.measure import Notes, paced_streams, two_cores
from benchmarks.relay.omni import omni_config

PERCENTILES = {"n": 1, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}


def mark_line(**changes: object) -> str:
    fields: dict[str, object] = dict.fromkeys(("ns", "ok", "tokens", "reads", "in_flight", "streams", "errors"), 0)
    fields |= {"error_kinds": {}, **changes}
    return json.dumps(fields | dict.fromkeys(("latency_ms", "ttft_ms", "token_ms"), PERCENTILES))


class TestProc:
    def test_stat_survives_a_name_with_brackets(self) -> None:
        fields = procs.parse_stat("42 (a) b) (c) S 7 1 1 0 -1 0 0 0 0 0 12 34 5 6 20 0 1 0 99\n")
        assert fields[:2] == ["S", "7"]
        assert fields[11:15] == ["12", "34", "5", "6"]

    def test_rollup_field(self) -> None:
        text = "0-1 ---p 0 00:00 0 [rollup]\nRss:    1776 kB\nPss:     517 kB\nPss_Anon: 116 kB\n"
        assert procs.parse_rollup_kb(text, "Pss:") == 517
        assert procs.parse_rollup_kb(text, "Swap:") == 0

    def test_busy_ticks_leave_out_idle_and_iowait(self) -> None:
        assert procs.parse_busy_ticks("cpu0 1 2 3 1000 500 4 5 6 0 0") == 21

    def test_listeners_are_counted_by_port_and_state(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):
                assert procs.listeners(Path("/proc/net/tcp").read_text(), port) == 1
        assert procs.listeners(Path("/proc/net/tcp").read_text(), port) == 0

    def test_clock_of_another_process_is_its_cpu_time(self) -> None:
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)  # what other tests had compiled
        own = time.process_time_ns() + int((reaped.ru_utime + reaped.ru_stime) * 1e9)
        assert own - 100_000_000 <= procs.cpu_ns([os.getpid()]) <= own + 1_000_000_000

    @pytest.mark.slow
    def test_the_tree_is_ended_by_pid(self, tmp_path: Path) -> None:
        script = "trap '' TERM; sleep 100 & sleep 100 & echo up; wait"
        cpus = sorted(os.sched_getaffinity(0))[:1]
        with procs.Proc(["bash", "-c", script], cpus, tmp_path / "log", pipes=True) as proc:
            assert proc.stdout is not None
            assert proc.stdout.readline() == b"up\n"
            pids = proc.pids()
            assert len(pids) == 3
            assert procs.memory_mb(pids) > 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and not zombie(pid)]


def zombie(pid: int) -> bool:
    return procs.parse_stat(Path(f"/proc/{pid}/stat").read_text())[0] == "Z"


class TestConfigs:
    def test_omni_config_is_yaml_with_every_worker(self) -> None:
        text = omni_config(9000, [9101, 9102], [9201, 9202], Path("/tmp/a.log"), processes=2)
        config = yaml.safe_load(text)
        assert config["access_log"] == {"path": "/tmp/a.log"}
        assert config["listen"] == {"host": "127.0.0.1", "port": 9000}
        assert config["processes"] == 2
        assert [(w["name"], w["role"]) for w in config["workers"]] == [
            ("p0", "prefill"),
            ("p1", "prefill"),
            ("d0", "decode"),
            ("d1", "decode"),
        ]

    def test_nginx_balances_decode_workers_only(self, tmp_path: Path) -> None:
        text = nginx_config(9000, [9201, 9202], tmp_path, processes=2)
        place = Place(9000, 9001, [9101], [9201, 9202], tmp_path, processes=2)
        with suppress(build.Missing):
            GATEWAYS[1].command(place)
            assert (tmp_path / "nginx.conf").read_text() == text
        assert "server 127.0.0.1:9201; server 127.0.0.1:9202;" in text
        assert "worker_processes 2;" in text

    def test_rows_are_distinct_and_the_yardsticks_run_round_robin(self) -> None:
        assert len({gateway.row for gateway in GATEWAYS}) == len(GATEWAYS)
        assert all("round robin" in gateway.row for gateway in GATEWAYS if gateway.yardstick)

    def test_a_missing_program_is_a_reason(self) -> None:
        with pytest.raises(build.Missing, match=r"no-such-program .*Debian package x"):
            build.find_program("no-such-program", "x")

    def test_arguments(self) -> None:
        args = parse_args(["--gateways", "omni,nginx", "--only", "request", "--load-cpu", "0"])
        assert args.gateways == ["nginx", "omni"]
        assert args.only == ["request"]
        assert args.load_cpu == (0,)
        with pytest.raises(SystemExit):
            parse_args(["--only", "nonsense"])


class TestPlan:
    def test_paced_streams_outlast_their_window(self) -> None:
        options = paced_streams(256, 3.0)
        assert options["max_tokens"] * options["interval_us"] >= 1e6 * (256 / 512 + 3.0)

    def test_second_core(self) -> None:
        assert two_cores([0], [1], [0, 1, 2, 3]).two == (0, 2)
        shared = two_cores([0], [1], [0, 1])
        assert shared.two == (0, 1)
        assert not shared.load_apart

    def test_a_busy_machine_is_noted_once(self) -> None:
        notes = Notes()
        for share in (0.05, 0.4, 0.2):
            notes.share_core("nginx", share)
        notes.share_core("omni", 0.01)
        assert [line.endswith("up to: nginx 40%") for line in notes.lines()] == [True]


class TestReport:
    column = report.Column("a / b", ("a", "b"), "request", digits=1, target=0.5)

    def test_medians_gaps_and_failures(self) -> None:
        results = report.Results()
        for value in (3.0, 1000.0, 5.0):
            results.add("x", {"a": value, "b": value * 1000})
        results.add("y", {"a": 1.0})
        results.fail("z", "request", "3 errors (status 503: 3)")
        results.fail("z", "request", "later reasons do not count")
        lines = report.table(results, ["x", "y", "z", "w"], [self.column]).splitlines()
        assert [line.split("|")[2].strip() for line in lines[2:]] == [
            "5.0 / 5,000.0",
            "1.0 / -",
            "fails",
            "-",
        ]
        assert report.failure_lines(results) == ["z, request: 3 errors (status 503: 3)"]

    def test_ratios_are_to_the_better_yardstick_by_figure(self) -> None:
        results = report.Results()
        for row, figures in {
            "v": {"request_1": 400.0, "request_32": 500.0},
            "s": {"request_1": 350.0, "request_32": 600.0},
            "omni": {"request_1": 140.0, "request_32": 400.0},
        }.items():
            results.add(row, figures)
        text = report.ratio_table(results, ["v", "s", "omni"], ["v", "s"], "omni")
        rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in text.splitlines()}
        assert [cell.strip() for cell in rows["omni"]] == ["0.40", "0.80"]
        assert [cell.strip() for cell in rows["reached"]] == ["yes", "NO"]

    def test_latency_is_shown_less_the_direct_row(self) -> None:
        results = report.Results()
        results.add(DIRECT, {"latency_p50": 0.2, "latency_p99": 0.3})
        results.add("x", {"latency_p50": 0.7, "latency_p99": 1.5})
        column = next(column for column in report.COLUMNS if column.added)
        assert results.shown("x", column, "latency_p50") == pytest.approx(0.5)
        assert results.shown(DIRECT, column, "latency_p50") == 0.2

    def test_marks_tell_what_went_wrong(self) -> None:
        mark = parse_mark(mark_line(errors=3, error_kinds={"truncated": 1, "status 503": 2}))
        assert describe_errors(mark) == "3 errors (status 503: 2, truncated: 1)"
        assert mark.ttft_ms.p99 == 1.0


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    if not all(map(shutil.which, ("g++", "setpriv", "taskset"))):
        pytest.skip("needs g++, and setpriv and taskset of util-linux")
    cpus = sorted(os.sched_getaffinity(0))
    mock, load = build.compile_tool("mock"), build.compile_tool("load")
    with Bench(mock, load, cpus[:1], cpus[-1:]) as running:
        yield running


@pytest.mark.slow
class TestMockAndLoad:
    def test_closed_loop_counts_agree(self, bench: Bench) -> None:
        before = bench.stats()
        with bench.load(bench.decode[0], connections=4, max_tokens=5, prompt_bytes=32768) as load:
            time.sleep(0.3)
            last = load.drain()
        assert last.ok > 20
        assert last.tokens == 5 * last.ok
        assert last.latency_ms.n == last.ok
        after = bench.stats()
        assert after.decode.requests - before.decode.requests == last.ok
        assert after.prefill == before.prefill

    def test_whole_answers_count_as_well(self, bench: Bench) -> None:
        with bench.load(bench.decode[1], connections=2, max_tokens=3, json=True) as load:
            time.sleep(0.2)
            last = load.drain()
        assert last.tokens == 3 * last.ok > 0

    def test_open_loop_keeps_its_rate(self, bench: Bench) -> None:
        with bench.load(bench.decode[0], rate=200, json=True) as load:
            time.sleep(0.5)
            last = load.drain()
        assert 40 < last.ok < 200

    def test_paced_streams_keep_their_pace_and_spread(self, bench: Bench) -> None:
        options = {"connections": 50, "each": 1, "max_tokens": 20, "interval_us": 20_000}
        with bench.load(bench.decode[0], **options) as load:
            time.sleep(0.3)
            middle = load.mark()
            last = load.drain()
        assert middle.streams == 50
        assert last.ok == 50
        assert last.tokens == 1000
        assert 360 < last.latency_ms.p50 < 800
        assert middle.ttft_ms.p50 > 4  # phases are spread over the interval

    def test_the_floor_moves_all_bytes(self, bench: Bench) -> None:
        floor = next(gateway for gateway in GATEWAYS if gateway.family == "floor")
        with (
            bench.subject(floor, cpus=bench.load_cpus) as subject,
            subject.load(connections=32, each=2, max_tokens=500) as load,
        ):
            time.sleep(0.5)
            assert load.drain().tokens == 32 * 2 * 500

    def test_an_early_end_is_an_error(self, bench: Bench) -> None:
        # A prefill worker never gives more than one token: the load must notice what is missing.
        with (
            bench.load(bench.prefill[0], connections=1, each=1, max_tokens=2) as load,
            pytest.raises(Failed, match=r"1 errors \(wrong number of tokens: 1\)"),
        ):
            load.drain()

    def test_a_refused_connection_is_an_error(self, bench: Bench) -> None:
        (port,) = free_ports(1)
        with (
            bench.load(port, connections=1, each=1) as load,
            pytest.raises(Failed, match="1 errors"),
        ):
            load.drain()


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_interrupt_ends_everything(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("g++", "setpriv", "taskset"))):
        pytest.skip("needs g++, and setpriv and taskset of util-linux")
    cpu = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "benchmarks.relay", "--gateways", "nginx", "--quick"]
    cores = ["--gateway-cpu", cpu, "--load-cpu", cpu]
    root = Path(build.__file__).parents[2]
    with (tmp_path / "out").open("wb") as out:
        # Where we were started in the background SIGINT is ignored, and children would inherit that.
        child = subprocess.Popen([*command, *cores], stdout=out, stderr=out, cwd=root, preexec_fn=_heed_interrupts)
    deadline = time.monotonic() + 60
    while len(procs.tree(child.pid)) < 3 and time.monotonic() < deadline:
        assert child.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.05)
    started = procs.tree(child.pid)
    child.send_signal(signal.SIGINT)
    child.wait(timeout=20)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert "interrupted" in (tmp_path / "out").read_text()
