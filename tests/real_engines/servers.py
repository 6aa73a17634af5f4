"""OpenAI servers of others that do both legs by themselves, as `aggregated` workers: how each is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from omni_proxy.demo import demo_model
from tests.real_engines.processes import Server, free_port


@dataclass(frozen=True)
class Kind:
    """One engine."""

    missing: Callable[[], str | None]
    """Why it cannot be started here."""
    command: Callable[[int], list[str]]
    """By port."""
    model: Callable[[], str]
    """By which name it serves its model."""
    ready: str = "/health"
    settings: Mapping[str, str] = field(default_factory=dict)


def _without_transformers() -> str | None:
    absent = [name for name in ("transformers", "fastapi", "uvicorn", "torch") if find_spec(name) is None]
    return f"needs {', '.join(absent)} (pip install 'transformers[serving]' torch)" if absent else None


def _transformers(port: int) -> list[str]:
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(demo_model())]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]


LLAMA_PYTHON = "OMNI_LLAMA_PYTHON"
LLAMA_MODEL = "OMNI_LLAMA_GGUF"


def _without_llama() -> str | None:
    set_to = [os.environ.get(name, "") for name in (LLAMA_PYTHON, LLAMA_MODEL)]
    if all(Path(path).is_file() for path in set_to):
        return None
    return f"needs {LLAMA_PYTHON}, a Python with llama-cpp-python[server], and {LLAMA_MODEL}, a GGUF file"


def _llama(port: int) -> list[str]:
    command = [os.environ[LLAMA_PYTHON], "-m", "llama_cpp.server", "--model", os.environ[LLAMA_MODEL]]
    return [
        *command,
        "--model_alias",
        "llama",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--n_ctx",
        "2048",
        "--interrupt_requests",
        "false",
    ]


KINDS = {
    "transformers": Kind(
        _without_transformers, _transformers, lambda: str(demo_model()), settings={"HF_HUB_OFFLINE": "1"}
    ),
    "llama.cpp": Kind(_without_llama, _llama, lambda: "llama", ready="/v1/models", settings={"PYTHONPATH": ""}),
}


def server(name: str, folder: Path) -> Server:
    """One of them, not started."""
    port = free_port()
    return Server(name, KINDS[name].command(port), port, folder, KINDS[name].settings)
