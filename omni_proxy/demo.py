"""The model that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO_NAME: Final = "omni-demo"


def demo_model() -> Path:
    """The folder of the demo model."""
    return Path(__file__).parent / "workers" / "demo_model"
