"""What the server knows of the model it serves: names, limits, and the folder's own sampling defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omni_proxy.workers.engine.openai_api import ApiError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say; model folders may set it in `generation_config.json`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def load_defaults(folder: Path) -> SamplingDefaults:
    """The model's own sampling defaults; anything unusable in the file counts as absent."""
    try:
        config = json.loads((folder / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return SamplingDefaults()
    names = ("temperature", "top_p", "top_k")
    values = {name: config[name] for name in names if isinstance(config.get(name), int | float)}
    return replace(SamplingDefaults(), **values)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the server knows of the model it serves."""

    names: tuple[str, ...]
    root: str
    max_model_len: int
    vocab_size: int
    created: int
    """Seconds since the epoch."""
    defaults: SamplingDefaults = SamplingDefaults()
    eos_token_ids: frozenset[int] = frozenset()

    def check_name(self, name: str | None) -> str:
        """The name to answer with; an unknown one is a 404, an absent one the first."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
        return name

    def entry(self, name: str) -> dict[str, Any]:
        """One entry of GET /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "omni-proxy",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
