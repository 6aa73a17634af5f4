"""The completion scripts, in the shells for which they are: what follows after some words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from omni_proxy.cli import main

SHELLS = ("bash", "zsh", "fish")
_ASK_BASH = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={last}; COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
_shtab_omni_proxy
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def _script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def _run(shell: str, *arguments: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return subprocess.run([shell, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_takes_the_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _script(shell, tmp_path, capsys)
    _run(shell, "-n", str(path))
    text = path.read_text(encoding="utf-8")
    assert "simulate" in text
    assert "schedule-mode" in text
    assert "_scheduler" not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("omni-proxy si", {"simulate"}),
        ("omni-proxy up --sch", {"--schedule-mode"}),
        ("omni-proxy worker --role d", {"decode"}),
        ("omni-proxy completion f", {"fish"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _script("bash", tmp_path, capsys)
    asked = _ASK_BASH.format(words=line, last=len(line.split()) - 1)
    assert set(_run("bash", "-c", asked, "bash", str(path)).split()) == expected


def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _script("fish", tmp_path, capsys)
    said = _run("fish", "--no-config", "-c", f"source {path}; complete -C 'omni-proxy worker --role d'")
    assert said.split("\t")[0].strip() == "decode"


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    assert ended.value.code == 2
    assert "csh" in capsys.readouterr().err
