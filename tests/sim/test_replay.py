"""Event logs: what is recorded replays to equal effects, and what does not is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.core import Core, CoreSettings
from omni_proxy.flow.settings import fields_of
from omni_proxy.messages import Arrived, Effect, Event, PrefillDone, Reconfigured, StartPrefill, WorkerUp
from omni_proxy.observe.recorder import MAGIC, BadLog, LogReader, Recorder
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.replay import replay
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World
from tests.core.steps import p, spec, worker
from tests.sim.helpers import SMALL

SETTINGS = CoreSettings(queue_timeout_s=2.0, prefix_aware=True)
BUCKETS = (LengthBucket(1000, ("p0",)), LengthBucket(None, ("p1",)))


def record(path: Path, change: int | None = None) -> int:
    """Record a run of a core without an index; `change`: at that step the log tells of no effects."""
    recorder = Recorder(path, SETTINGS)
    steps = 0

    def observe(now: float, event: Event, effects: Sequence[Effect]) -> None:
        nonlocal steps
        steps += 1
        recorder(now, event, [] if steps == change else effects)

    workload = parse_synthetic("prefixes,requests=60,rate=20,prompt=80,prefix=128,output=10", 1)
    World(workload, make_cluster(2, 1, 0, SMALL), lambda index: Core(SETTINGS), observers=[observe]).run()
    recorder.close()
    return steps


def test_a_recorded_run_replays_to_equal_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = record(tmp_path / "log")
    done = replay(tmp_path / "log", Core)
    assert (done.steps, done.difference, done.cut) == (steps, None, False)
    reader = LogReader(tmp_path / "log")
    assert reader.settings == SETTINGS
    assert len(list(reader.frames())) == steps
    assert main(["replay", str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out.startswith(f"Equal: {steps} steps")


def test_the_first_difference_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "log", change=8)
    assert main(["replay", str(tmp_path / "log")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Different at step 8, at ")
    assert "recorded: nothing more" in text
    assert 'replayed: {"type":"' in text


def test_a_log_replays_across_a_change_of_settings(tmp_path: Path) -> None:
    recorder, core, starts = Recorder(tmp_path / "log", CoreSettings()), Core(CoreSettings()), []
    limited = CoreSettings(scheduling=SchedulingSettings(order="shortest-uncached", length_buckets=BUCKETS))
    events = [WorkerUp(worker("p0", max_seqs=1)), WorkerUp(worker("d0"))]
    events += [Arrived(rid, spec(tokens)) for rid, tokens in (("a", 100), ("b", 5000), ("c", 50))]
    events += [Reconfigured(fields_of(limited)), PrefillDone(p("a", 1, "p0"), handoff=True)]
    for at, event in enumerate(events):
        effects = core.handle(event, at / 10)
        recorder(at / 10, event, effects)
        starts += [e.lease.rid for e in effects if isinstance(e, StartPrefill)]
    recorder.close()
    assert starts == ["a", "c"], "the new order was used"
    assert replay(tmp_path / "log", Core).difference is None


def test_damaged_settings_in_a_log_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "log", CoreSettings())
    recorder(0.0, Reconfigured({"retries": {"odd": 1}}), [])
    recorder.close()
    assert main(["replay", str(tmp_path / "log")]) == 2
    assert "frame 1 is damaged" in capsys.readouterr().err


def test_another_core_is_found_out(tmp_path: Path) -> None:
    record(tmp_path / "log")
    done = replay(tmp_path / "log", lambda s: Core(dataclasses.replace(s, queue_timeout_s=0.1)))
    assert done.difference is not None


def test_a_log_that_was_cut_replays_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = record(tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-3])
    assert main(["replay", str(tmp_path / "cut")]) == 0
    shown = capsys.readouterr().out
    assert "in the middle of a step" in shown
    assert f"Equal: {steps - 1} steps" in shown


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is no event log"),
        (b"hello world, this is text", "is no event log"),
        (MAGIC, "ends within its header"),
        (MAGIC + b"\0\0\0\2\x92", "ends within its header"),
        (MAGIC + b"\0\0\0\3\x92\x09\x80", "has version 9"),
        (MAGIC + b"\0\0\0\1\xc0", "header is damaged"),
        (MAGIC + b"\0\0\0\3\x92\x02\x80\0\0\0\1\xc0", "frame 1 is damaged"),
        (MAGIC + b"\0\0\0\3\x92\x02\x80\xff\0\0\0", "is damaged: a frame of"),
    ],
)
def test_what_is_no_log(tmp_path: Path, data: bytes, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    assert main(["replay", str(path)]) == 2
    shown = capsys.readouterr().err
    assert fault in shown
    assert len(shown.splitlines()) == 1


def test_an_absent_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_only(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs /dev/full")
    recorder = Recorder(path, SETTINGS)
    recorder.close()
    assert "recording ends" in caplog.text


def test_a_reader_closes_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x")
    with pytest.raises(BadLog):
        LogReader(tmp_path / "log")
