"""The backends under test: the definition, and the compiled kernels once for every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import omni_kernels as ops
from omni_kernels import registry

ON_DEMAND = ("asan", "ascend", "cross")
"""Marks of tests that run only where `-m` names them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ON_DEMAND:
        if mark in config.option.markexpr:
            continue
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"runs with -m {mark}"))


def _variants() -> list[str]:
    library = registry.cpu_library()
    if library is None:
        return []
    usable = [i for i in range(library.omni_isa_count()) if library.omni_isa_usable(i)]
    return [library.omni_isa_name(i).decode() for i in usable]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["torch", *_variants()])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the backend to pack for; the compiled one runs the instruction set of the test's id."""
    yield from _selected(request.param)


@pytest.fixture(params=_variants())
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `backend`, the compiled ones only."""
    yield from _selected(request.param)


def _selected(variant: str) -> Iterator[str]:
    if variant == "torch":
        yield "torch"
        return
    library = registry.cpu_library()
    assert library is not None
    assert ops.backends()["cpu"] == "ok"
    before = library.omni_isa_current()
    names = [library.omni_isa_name(i).decode() for i in range(library.omni_isa_count())]
    assert library.omni_isa_select(names.index(variant)) == 0
    yield "cpu"
    assert library.omni_isa_select(before) == 0
