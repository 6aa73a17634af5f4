"""The relay's rig, for attackers."""

from __future__ import annotations

from tests.relay.conftest import pytest_asyncio_loop_factories, start

__all__ = ["pytest_asyncio_loop_factories", "start"]
