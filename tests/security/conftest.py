"""The relay's rig, for attackers."""

from __future__ import annotations

import pytest

from tests.relay.conftest import pytest_asyncio_loop_factories, start

__all__ = ["pytest_asyncio_loop_factories", "start"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Schemathesis takes a while: it runs only where it is asked for by its marker."""
    if "schemathesis" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("schemathesis") is None]
