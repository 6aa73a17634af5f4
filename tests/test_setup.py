"""What setup.py compiles can be compiled: mypyc drops the keywords of a struct's class line, silently."""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def _compiled() -> list[Path]:
    text = (ROOT / "setup.py").read_text()
    patterns = ast.literal_eval(re.search(r"COMPILED = (\(.*?\n\))", text, re.DOTALL)[1])  # type: ignore[index]
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def test_every_module_that_is_compiled_exists() -> None:
    assert len(_compiled()) > 20


def test_no_compiled_module_defines_structs_or_subclasses_of_foreign_classes() -> None:
    foreign = {"Struct", "BaseModel", "HttpToolsProtocol", "Collector"}
    for path in _compiled():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & foreign, f"{path}: {node.name} cannot be compiled"


def test_no_compiled_module_has_a_plain_final_tuple_of_numbers() -> None:
    """mypyc unboxes it and then takes it for unset; `Final[tuple[float, ...]]` stays a tuple."""
    for path in _compiled():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Name) and node.value is not None:
                value = node.value
                numbers = isinstance(value, ast.Tuple) and all(
                    isinstance(e, ast.Constant) and isinstance(e.value, int | float) for e in value.elts
                )
                assert not numbers, f"{path}:{node.lineno}: annotate the tuple"


def test_no_compiled_module_looks_in_a_starred_tuple() -> None:
    """`x in (a, *b)` ends mypyc with an internal error, and the package would be built without compiled modules."""
    for path in _compiled():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                displays = [c for c in node.comparators if isinstance(c, ast.Tuple | ast.List | ast.Set)]
                assert not any(isinstance(e, ast.Starred) for d in displays for e in d.elts), f"{path}:{node.lineno}"


def test_no_compiled_module_imports_what_needs_more_than_the_build_has() -> None:
    """mypyc looks at all that is imported, with no dependency installed: subclasses of uvicorn's have faults then."""
    todo, seen = _compiled(), set[Path]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                where = ROOT.joinpath(*name.split("."))
                todo += [one for one in (where.with_suffix(".py"), where / "__init__.py") if one.exists()]
    assert ROOT / "omni_proxy" / "core.py" in seen
    assert ROOT / "omni_proxy" / "api" / "front.py" not in seen


def _extensions(monkeypatch: pytest.MonkeyPatch, command: str) -> dict[str, Any]:
    """What setup.py has built for a command, by name; mypyc takes minutes and is not asked."""
    built: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda ext_modules: built.update({m.name: m for m in ext_modules}))
    monkeypatch.setitem(sys.modules, "mypyc.build", None)
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with contextlib.chdir(ROOT):
        runpy.run_path(str(ROOT / "setup.py"))
    return built


@pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll")
def test_the_pump_is_built_in_every_install_and_may_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in editable ones: there its tests run."""
    for command in ("bdist_wheel", "editable_wheel", "build_ext"):
        pump = _extensions(monkeypatch, command)["omni_proxy.relay._pump"]
        assert (pump.optional, [(ROOT / source).exists() for source in pump.sources]) == (True, [True])


def test_the_body_scanner_is_built_in_every_install_and_may_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("bdist_wheel", "editable_wheel", "build_ext"):
        scanner = _extensions(monkeypatch, command)["omni_proxy._body_scan"]
        assert (scanner.optional, [(ROOT / source).exists() for source in scanner.sources]) == (True, [True])
        assert {ROOT / header for header in scanner.depends} == set(ROOT.glob("omni_proxy/*.h"))


def test_a_pure_install_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_PURE", "1")
    assert not {"omni_proxy.relay._pump", "omni_proxy._body_scan"} & _extensions(monkeypatch, "bdist_wheel").keys()
