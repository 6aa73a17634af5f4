"""`omni-proxy place`: what it prints and writes, and one line with exit code 2 for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from omni_proxy.cli import main
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import checked, read_windows
from omni_proxy.workers.engine.placement.plan import from_json


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.npy"
    np.save(path, np.random.default_rng(0).gamma(1.0, size=(3, 16)) + 0.01)
    return path


def run(*arguments: object) -> int:
    return main(["place", *map(str, arguments)])


def test_prints_before_and_after_and_writes_all_files(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, heat, pattern = tmp_path / "p.json", tmp_path / "h.html", tmp_path / "p.npy"
    files = ("--out", out, "--heatmap", heat, "--pattern", pattern)
    assert run("--loads", loads, "--ranks", 4, "--redundancy", 4, *files) == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if line[:5].strip().isdigit()]) == 3
    assert "the window that was fitted" in printed
    assert from_json(out.read_text()).ranks == 4
    assert np.load(pattern).shape == (4, 3, 16)
    page = heat.read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page


def test_several_windows_are_judged_by_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"loads": np.random.default_rng(0).gamma(1.0, size=(4, 2, 8)).tolist()}))
    assert run("--loads", path, "--ranks", 2, "--redundancy", 2, "--split", "proportional", "--memory", "pooled") == 0
    assert "the next window" in capsys.readouterr().out


def test_small_moves_start_from_a_saved_placement(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, hot = tmp_path / "p.json", tmp_path / "hot.npy"
    assert run("--loads", loads, "--ranks", 4, "--redundancy", 4, "--out", out) == 0
    tokens = np.load(loads)
    tokens[:, 0] *= 10
    np.save(hot, tokens)
    capsys.readouterr()
    assert run("--loads", hot, "--ranks", 4, "--from", out, "--max-moves", 2, "--expert-bytes", 1 << 20) == 0
    printed = capsys.readouterr().out
    assert "experts to copy" in printed
    assert "GB" in printed
    assert run("--loads", hot, "--ranks", 4, "--redundancy", 4, "--from", out) == 0


def test_csv_and_layer_objects_are_read(tmp_path: Path) -> None:
    table = tmp_path / "loads.csv"
    table.write_text("layer,expert,tokens\n0,0,5\n0,2,1\n1,1,4\n")
    assert read_windows(table).tolist() == [[[5.0, 0.0, 1.0], [0.0, 4.0, 0.0]]]
    layers = tmp_path / "loads.json"
    layers.write_text('{"1": [1, 2], "0": [3, 4]}')
    assert read_windows(layers).tolist() == [[[3.0, 4.0], [1.0, 2.0]]]


@pytest.mark.parametrize(
    ("content", "arguments", "fault"),
    [
        ("[[1, 2], [NaN, 1]]", (), Fault.LOADS_NOT_FINITE),
        ("[[1, 2], [-1, 1]]", (), Fault.LOADS_NEGATIVE),
        ("[[1, 2], [0, 0]]", (), Fault.LAYER_WITHOUT_LOAD),
        ("[[1, 2], [1]]", (), Fault.LOADS_SHAPE),
        ("[1, 2]", (), Fault.LOADS_SHAPE),
        ("[]", (), Fault.LOADS_SHAPE),
        ('{"0": [1, 2], "2": [1, 2]}', (), Fault.LAYERS_MISSING),
        ("[[1, 2]]", ("--layers", 2), Fault.LAYERS_MISSING),
        ("{", (), Fault.LOADS_UNREADABLE),
        ('{"a": [1, 2]}', (), Fault.LOADS_UNREADABLE),
        ("[[1, 2, 3]]", ("--slots", 1), Fault.TOO_FEW_SLOTS),
        ("[[1, 2, 3]]", ("--redundancy", 9), Fault.TOO_MANY_SLOTS),
        ("[[1, 2]]", ("--nodes", 3), Fault.RANKS_NOT_DIVISIBLE),
        ("[[1, 2]]", ("--nodes", 2, "--groups", 3), Fault.GROUPS_NOT_DIVISIBLE),
        ("[[1, 2, 3]]", ("--nodes", 2, "--groups", 2), Fault.GROUPS_NOT_DIVISIBLE),
        ("[[1, 2]]", ("--nodes", 2, "--groups", 2, "--redundancy", 1), Fault.REDUNDANCY_NOT_DIVISIBLE),
        ("[[1, 2]]", ("--max-moves", 2), Fault.BAD_OPTION),
        ("[[1, 2]]", ("--from", "nowhere.json"), Fault.BAD_PLACEMENT),
        ("[[1, 2]]", ("--out", "/nowhere/p.json"), Fault.BAD_OPTION),
        ("[[1, 2]]", ("--pattern", "/nowhere/p.npy"), Fault.BAD_OPTION),
    ],
)
def test_bad_input_is_one_named_line(
    content: str, arguments: tuple[object, ...], fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loads.json"
    path.write_text(content)
    assert run("--loads", path, "--ranks", 2, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"omni-proxy place: {fault.value}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["missing.npy", "loads.txt"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loads", tmp_path / name, "--ranks", 2) == 2
    assert Fault.LOADS_UNREADABLE.value in capsys.readouterr().err


def test_a_saved_placement_of_another_shape_is_refused(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert run("--loads", loads, "--ranks", 4, "--out", out) == 0
    assert run("--loads", loads, "--ranks", 2, "--from", out) == 2
    assert "bad_placement" in capsys.readouterr().err


def test_experts_without_tokens_are_placed_all_the_same() -> None:
    assert checked([[0, 0, 5], [1, 0, 0]]).shape == (2, 3)
    with pytest.raises(PlacementError):
        checked([[0, 0, 5], [1, 0, float("inf")]])
