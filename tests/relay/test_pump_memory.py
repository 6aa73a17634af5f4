"""The pump's C under AddressSanitizer: all its tests again, with every access to memory watched (`-m asan`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "omni_proxy" / "relay" / "pump.c"
TESTS = (
    "test_pump.py",
    "test_pump_thread.py",
    "test_pump_way_back.py",
    "test_pumping.py",
    "test_broken_streams.py",
    "test_cancel.py",
    "test_backpressure.py",
)

SANITIZED = """
import importlib.util
import sys
import pytest
name = "omni_proxy.relay._pump"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules[name] = module
sys.exit(pytest.main([*sys.argv[2:], "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.asan
@pytest.mark.timeout(900)
def test_no_memory_fault_under_address_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no gcc, or no epoll")
    target = tmp_path / "pump.so"
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror"]
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run(
        [compiler, *flags, "-Wno-missing-field-initializers", "-shared", "-fPIC", include, SOURCE, "-o", target],
        check=True,
    )
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, target, *(str(ROOT / "tests" / "relay" / name) for name in TESTS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1",
            "PYTHONMALLOC": "malloc",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
