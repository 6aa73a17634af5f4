"""The Triton kernels lowered for an Ascend 910B, in a virtual environment that has triton-ascend in triton's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOWER = Path(__file__).parents[2] / "kernels" / "bench" / "ascend_lower.py"
PACKAGES = ("triton-ascend==3.2.0", "pybind11", "setuptools", "numpy")


@pytest.mark.ascend
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="triton-ascend 3.2 is for Python up to 3.11")
@pytest.mark.timeout(900)
def test_kernels_lower_to_matrix_products(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    done = subprocess.run([python, str(LOWER)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: kernel["matmul"] for name, kernel in found.items()} == {"gate_up": 2, "down": 1, "combine": 0}
    assert found["gate_up"]["discrete"] == 0, "contiguous rows must not be copied one by one"
