"""Builds the sdist and, from it, the wheel; installs the wheel alone in a fresh environment and serves with it.

    scripts/package-check [FOLDER]      # keeps both in FOLDER

Needs a C++ compiler and the package index, and takes some minutes. Anything that is missing ends it with a reason.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"omni_proxy/": "omni_proxy/", "kernels/omni_kernels/": "omni_kernels/"}
"""Where a package lies in the repository, and where in the wheel."""
NOT_IN_THE_SDIST = (".ci/", ".github/", ".gitignore", ".dockerignore")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def tracked() -> list[str]:
    """The files of the repository."""
    return subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")[
        :-1
    ]


def in_wheel(files: Iterable[str]) -> set[str]:
    """What of them belongs into a wheel, by its name there."""
    return {
        there + name.removeprefix(here) for name in files for here, there in PACKAGES.items() if name.startswith(here)
    }


def require(what: str, wanted: set[str], found: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise SystemExit(f"{what} lacks {len(missing)} files: {', '.join(missing[:10])}")


def environment(folder: Path, *packages: str | Path) -> Path:
    """A fresh environment with these; returns its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    return folder / "bin"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else folder / "dist"
        run(environment(folder / "builder", "build") / "python", "-m", "build", "--outdir", out, ROOT)
        files = tracked()
        (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
        with tarfile.open(sdist) as archive:
            held = {member.partition("/")[2] for member in archive.getnames()}
        require("the sdist", {file for file in files if not file.startswith(NOT_IN_THE_SDIST)}, held)
        with zipfile.ZipFile(wheel) as packed:
            require("the wheel", in_wheel(files), set(packed.namelist()))
        programs = environment(folder / "user", wheel)
        empty = folder / "empty"
        empty.mkdir()
        run(programs / "python", ROOT / "scripts" / "package_use.py", cwd=empty)
        print(
            f"{sdist.name} ({sdist.stat().st_size >> 10} KiB) and {wheel.name} ({wheel.stat().st_size >> 10} KiB): good"
        )


if __name__ == "__main__":
    main()
