"""`omni-proxy deploy render`: from a recipe to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from omni_proxy.config import ConfigError
from omni_proxy.deploy import compose, kubernetes, shell, systemd
from omni_proxy.deploy.recipe import Deployment, load_recipe

RENDERERS: Final[Mapping[str, Callable[[Deployment], dict[str, str]]]] = {
    "systemd": systemd.render,
    "compose": compose.render,
    "kubernetes": kubernetes.render,
    "shell": shell.render,
}


def run_render(recipe: Path, to: str, folder: Path | None, say: Callable[[str], None]) -> int:
    """Write the files under `folder`, or show them. Raises ConfigError."""
    deployment = load_recipe(recipe)
    try:
        files = RENDERERS[to](deployment)
    except ConfigError as exc:
        raise ConfigError(f"{recipe}: {exc}") from exc
    if folder is None:
        say("\n".join(text if len(files) == 1 else f"# ---- {path}\n{text}" for path, text in files.items()))
        return 0
    for path, text in files.items():
        say(str(_written(folder / path, text)))
    return 0


def _written(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    except OSError as exc:
        raise ConfigError(f"--output: {path}: {exc.strerror}") from exc
    return path
