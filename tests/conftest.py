"""Hypothesis profiles: `default`, `thorough` by `HYPOTHESIS_PROFILE=thorough`; and what runs only on demand."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A soak and a run under AddressSanitizer take their time: only where their marker asks (`-m soak`)."""
    for mark in ("soak", "asan"):
        if mark not in config.option.markexpr:
            items[:] = [item for item in items if item.get_closest_marker(mark) is None]
