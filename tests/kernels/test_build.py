"""Where the compiled library comes from, and what happens where there is none. Only the marked tests compile."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kernels import registry
from omni_kernels.cpu import build, native

TESTS = Path(__file__).parent


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No packaged library and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_packaged", lambda: None)
    return tmp_path


def test_without_a_compiler_torch_serves_and_the_log_says_so(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(nothing_built))
    with caplog.at_level(logging.WARNING, "omni_kernels"):
        found, reason = native.find_library()
    assert found is None
    assert reason == "no C++ compiler found"
    assert "falling back to torch: no C++ compiler found" in caplog.text


def test_a_failing_compiler_is_quoted_in_one_line(nothing_built: Path) -> None:
    compiler = nothing_built / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 3\n")
    compiler.chmod(0o700)
    with pytest.raises(build.BuildError, match=r"broken: exit 3: x\.cpp:1: error: no such thing$"):
        build.compile_library(nothing_built / "x.so", compiler=str(compiler))


def test_a_cache_that_cannot_be_made_is_a_reason(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    (nothing_built / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_built / "file"))
    assert "file" in native.find_library()[1]


def test_the_cache_is_used_and_keyed_by_content(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(build, "compile_library", lambda target: (made.append(target), target.write_bytes(b""))[1])
    first = build.cached_library()
    assert build.cached_library() == first
    assert len(made) == 1
    assert build.source_hash() in first.name


def test_a_library_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.cpu_library() is None:
        pytest.skip("nothing compiled here")
    path = build.cached_library()
    monkeypatch.setattr(Path, "glob", lambda _self, pattern: [path] if pattern == "_omni_cpu*.so" else [])
    monkeypatch.setattr(build, "source_hash", lambda: "other")
    assert native._packaged() is None


SANITIZED = """
import sys
from pathlib import Path
import pytest
from omni_kernels.cpu import build, native
native._packaged = lambda: None
build.cached_library = lambda: Path(sys.argv[1])
sys.exit(pytest.main([*sys.argv[2:], "-q", "-p", "no:cacheprovider"]))
"""


SANITIZED_TESTS = ("backends", "decoder", "burst_drafts", "whole_numbers")


@pytest.mark.asan
@pytest.mark.timeout(900)
def test_no_memory_fault_under_address_sanitizer(tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    target = tmp_path / "asan.so"
    build.compile_library(target, ["-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"])
    runtime = subprocess.run(
        [build.find_compiler() or "", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(target), *(str(TESTS / f"test_{name}.py") for name in SANITIZED_TESTS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parents[1],
        env={
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.cross
@pytest.mark.timeout(600)
def test_the_sources_compile_for_arm_to_fused_multiply_adds(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    dump = shutil.which("aarch64-linux-gnu-objdump")
    if compiler is None or dump is None:
        pytest.skip("no compiler for Arm (Debian: g++-aarch64-linux-gnu)")
    target = tmp_path / "arm.so"
    build.compile_library(target, compiler=compiler)
    code = subprocess.run([dump, "-d", str(target)], capture_output=True, text=True, check=True).stdout
    assert sum("fmla" in line and ".4s" in line for line in code.splitlines()) > 100
