"""What the documents say is there: pages, files, commands with their options, extras, markers."""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from omni_proxy.cli.command_line import parser
from omni_proxy.config import ConfigError, parse, validated
from omni_proxy.deploy.recipe import deployment
from omni_proxy.errors import ErrorCode
from omni_proxy.ray.pools import RayPools
from tests.docs_commands import CONFIGS, PAGES, ROOT, Command, commands, commands_in_comments

_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_SHOWN = sorted(
    {
        *(command for page in PAGES for command in commands(page)),
        *(command for config in CONFIGS for command in commands_in_comments(config)),
    },
    key=str,
)


def _shown(program: str) -> list[Command]:
    return [command for command in _SHOWN if command.words[0] == program]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} points to {target}"
            if anchor and file.suffix == ".md":
                assert anchor in _anchors(file), f"{page.name} points to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and mkdocs make them of plain words."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_code_that_names_a_page_names_one_that_exists() -> None:
    for source in (ROOT / "omni_proxy").rglob("*.py"):
        for name in re.findall(r"docs/[a-z-]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{source.name} names {name}"


def test_the_pages_show_commands() -> None:
    """Else the tests below would pass because nothing was found."""
    verbs = {command.words[1] for command in _shown("omni-proxy") if len(command.words) > 1}
    assert {"up", "serve", "check", "simulate", "plan", "replay", "worker", "bench", "import-nginx"} <= verbs
    assert len(_SHOWN) > 60


@pytest.mark.parametrize("command", [c for c in _shown("omni-proxy") if c.whole and len(c.words) > 1], ids=str)
def test_omni_proxy_takes_it(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*command.words[1:]]
    if {"--help", "--version"} & set(arguments):
        return
    try:
        parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


@pytest.mark.parametrize("command", [c for c in _shown("omni-proxy") if not c.whole and len(c.words) > 1], ids=str)
def test_inline_commands_name_what_exists(command: Command) -> None:
    commands = parser()
    (verbs,) = (a for a in commands._actions if isinstance(a, argparse._SubParsersAction))
    for word in command.words[1:2]:
        if word.startswith("-"):
            assert word in commands._option_string_actions
        else:
            assert word in verbs.choices, f"{command}: there is no such command"
            _flags_exist(command, verbs.choices[word])


def _flags_exist(command: Command, parser: argparse.ArgumentParser) -> None:
    for word in command.words[2:]:
        flag = word.partition("=")[0]
        assert not flag.startswith("--") or flag in parser._option_string_actions, f"{command}: there is no {flag}"


_MODULES = [c for c in _shown("python") if c.words[1:2] == ("-m",) and c.words[2].startswith(("omni_", "benchmarks."))]


@pytest.mark.parametrize("command", _MODULES, ids=str)
def test_python_modules_exist_with_their_options(command: Command) -> None:
    module = command.words[2]
    if module == "omni_proxy":
        if command.words[3:]:
            parser().parse_args(command.words[3:])
        return
    places = [root.joinpath(*module.split(".")) for root in (ROOT, ROOT / "kernels")]
    sources = [place / "__main__.py" for place in places] + [place.with_suffix(".py") for place in places]
    found = [source for source in sources if source.exists()]
    assert found, f"{command}: there is no module {module} that could be run"
    text = "".join(source.read_text(encoding="utf-8") for source in found[0].parent.glob("*.py"))
    for flag in (word.partition("=")[0] for word in command.words[3:] if word.startswith("--")):
        assert f'"{flag}"' in text, f"{command}: no module beside {module} has {flag}"


@pytest.mark.parametrize("command", [c for c in _SHOWN if c.words[0] == "pytest" or "pytest" in c.words[1:3]], ids=str)
def test_pytest_finds_its_files_and_markers(command: Command) -> None:
    markers = {line.partition(":")[0] for line in _PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    after_m = False
    for word in command.words[command.words.index("pytest") + 1 :]:
        if after_m:
            assert set(re.findall(r"\w+", word)) - {"not", "and", "or"} <= markers, f"{command}: unknown marker"
        elif word.startswith("tests"):
            assert (ROOT / word.partition("::")[0]).exists(), f"{command}: there is no {word}"
        after_m = word == "-m"


@pytest.mark.parametrize("command", [c for c in _SHOWN if c.words[0].startswith("scripts/")], ids=str)
def test_scripts_exist(command: Command) -> None:
    assert (ROOT / command.words[0]).exists()


def test_extras_exist() -> None:
    extras = set(_PROJECT["project"]["optional-dependencies"])
    for page in PAGES:
        for named in re.findall(r"(?:omni-proxy|'\.)\[([\w,-]+)\]", page.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{page.name}: [{named}]"


def test_the_map_of_folders_names_them_all() -> None:
    """docs/architecture.md, against the tree."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Folders")[2]
    package = ROOT / "omni_proxy"
    for path in (*package.iterdir(), *(package / "workers").iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            name = f"{path.relative_to(package)}/"
            assert f"`{name}`" in text or f"`{path.name}/`" in text, f"docs/architecture.md lacks {name}"
    for name in re.findall(r"`([a-z_/]+(?:/|\.py))`", text):
        places = (
            package / name,
            package / "workers" / name,
            package / "workers" / "engine" / name,
            package / "sim" / name,
        )
        assert any(place.exists() for place in places), f"docs/architecture.md names {name}"


_YAML = re.compile(r"^```yaml\n(.*?)^```", re.M | re.S)
_CONFIGS = [
    (page, number, match[1])
    for page in PAGES
    for number, match in enumerate(_YAML.finditer(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("page", "number", "text"), _CONFIGS, ids=lambda v: v.name if isinstance(v, Path) else None)
def test_configs_in_pages_are_valid(page: Path, number: int, text: str) -> None:
    """Each is a config, a recipe or Ray pools by itself; a hash that is cut short stands for any."""
    counted = itertools.count()
    whole = re.sub("sha256:…", lambda _: f"sha256:{next(counted):064x}", text)
    data = yaml.safe_load(whole)
    try:
        if "hosts" in data:
            deployment(data, page.name)
        elif "engine" in data:
            validated(RayPools, data, page.name)
        else:
            parse(data, page.name)
    except ConfigError as fault:
        pytest.fail(str(fault))


def test_python_in_pages_is_python() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            compile(block, page.name, "exec")


def test_the_page_of_the_configuration_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "config_page.py"), "--print"],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == done.stdout, "run python scripts/config_page.py"


def test_every_error_code_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [code.value for code in ErrorCode if f"`{code.value}`" not in text] == []


_COMPOSED = re.compile(r"^omni_(?:replicas|kv_events)_")
"""Families whose names are put together in the source."""


def test_metrics_of_pages_exist() -> None:
    sources = [path for folder in ("omni_proxy", "kernels") for path in (ROOT / folder).rglob("*.py")]
    written = "".join(path.read_text(encoding="utf-8") for path in sources)
    named = {
        (name, page.name)
        for page in PAGES
        for name in re.findall(r"`(omni_[a-z0-9_]+[a-z0-9])(?:\{[a-z_,=|\"\.]*\})?`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    for name, page in sorted(named):
        stems = {name, name.removesuffix("_total"), re.sub(r"_(count|sum|bucket)$", "", name)}
        known = any(f'"{stem}"' in written or f'"{_COMPOSED.sub("", stem)}"' in written for stem in stems)
        assert known, f"{page} names the metric {name}"


def test_every_command_is_shown_in_a_page() -> None:
    (verbs,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    shown = {
        command.words[1] for command in _shown("omni-proxy") if command.page.startswith("docs/") and command.words[1:]
    }
    assert {verb for verb in verbs.choices if not verb.startswith("_")} - shown == set()
