"""Compiles the C++ kernels: which files, which flags, and a cache of libraries by content.

Used by the package's own build (`setup.py`) and, in a checkout without a built library, on first use.
Imports the standard library alone, since the package's build runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # not Unix: two processes may compile the same file, the last wins
    fcntl = None  # type: ignore[assignment]

_LOG = logging.getLogger("omni_kernels")

SOURCE_DIR: Final = Path(__file__).with_name("src")
FLAGS: Final = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
COMPILE_LIMIT_S: Final = 600.0


class BuildError(RuntimeError):
    """The library could not be compiled; the text is one line."""


def sources() -> list[Path]:
    """The translation units, one per instruction set and the dispatcher."""
    return sorted(SOURCE_DIR.glob("*.cpp"))


def source_hash() -> str:
    """Identity of the sources and flags, built into the library as well."""
    state = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
    for path in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def find_compiler() -> str | None:
    """A C++ compiler on the path: g++ first, for its vector extensions are the ones tested."""
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def cache_dir() -> Path:
    """Where libraries compiled on first use are kept, for this user alone."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omni_kernels"


def cached_library() -> Path:
    """Compile the sources unless this user has their library already. Raises BuildError."""
    target = cache_dir() / f"omni_cpu-{source_hash()}-{sys.platform}.so"
    if target.is_file():
        return target
    if find_compiler() is None:
        raise BuildError("no C++ compiler found")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _one_at_a_time(target.with_suffix(".lock")):
            if not target.is_file():
                _LOG.warning("compiling the CPU kernels once, which takes about a minute: %s", target)
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    made = Path(folder) / target.name
                    compile_library(made)
                    made.replace(target)
    except OSError as exc:
        raise BuildError(f"{target.parent}: {exc.strerror or exc}") from exc
    return target


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Of several processes that need the library at once, one compiles. Released if the process dies."""
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_library(target: Path, extra_flags: Sequence[str] = (), compiler: str | None = None) -> None:
    """Compile all sources into the shared library `target`. Raises BuildError."""
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found")
    define = f'-DOMNI_SOURCE_HASH="{source_hash()}"'
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{path.stem}.o" for path in sources()]

        def one(pair: tuple[Path, Path]) -> None:
            _run([compiler, *FLAGS, *extra_flags, define, "-c", str(pair[0]), "-o", str(pair[1])])

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(one, zip(sources(), objects, strict=True)))
        _run([compiler, *FLAGS, *extra_flags, "-shared", *map(str, objects), "-o", str(target)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildError(f"{command[0]}: {exc}") from exc
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise BuildError(f"{command[0]}: exit {done.returncode}: {' '.join(first.split())}")
