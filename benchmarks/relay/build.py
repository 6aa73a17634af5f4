"""What a run needs and the machine may lack: compiled tools, and the peers in their own venvs.

All of it lies in the user's cache folder and is kept there. What cannot be had becomes `Missing`
with a reason that the report prints.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_INSTALL_TIMEOUT_S = 300.0


class Missing(Exception):
    """Something cannot be had on this machine; the message says what and why."""


def cache_dir() -> Path:
    """Where tools and venvs are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "omni-proxy-bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def compile_tool(name: str) -> Path:
    """The program of NAME.cpp, built anew only when its sources have changed."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise Missing("no g++ to build the mock workers and the load generator")
    source = _HERE / f"{name}.cpp"
    digest = hashlib.sha256(source.read_bytes() + (_HERE / "net.hpp").read_bytes()).hexdigest()
    binary = cache_dir() / f"relay-{name}-{digest[:12]}"
    if not binary.exists():
        partial = binary.with_suffix(f".{os.getpid()}")
        _run([compiler, "-std=c++17", "-O2", "-o", str(partial), str(source)], f"build {name}")
        partial.rename(binary)
    return binary


def find_program(name: str, package: str) -> str:
    """Path of an installed program; looks where Debian puts servers, too."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise Missing(f"{name} is not installed (Debian package {package})")
    return path


def peer_program(package: str, version: str) -> str:
    """A program of the same name as its PyPI package, from a venv made for it."""
    venv = cache_dir() / f"{package}-{version}"
    ready = venv / ".ready"
    if not ready.exists():
        shutil.rmtree(venv, ignore_errors=True)
        python = shutil.which("python3.11") or sys.executable
        _run([python, "-m", "venv", str(venv)], f"create a venv for {package}")
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--only-binary=:all:", f"{package}=={version}"], f"install {package}")
        ready.touch()
    return str(venv / "bin" / package)


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Missing(f"cannot {what}: {exc}") from exc
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = (lines or done.stderr.splitlines() or ["no output"])[0]
        raise Missing(f"cannot {what}: {reason}")
