"""The folder through which the processes of one gateway find each other. Only its owner may look in."""

from __future__ import annotations

from pathlib import Path

from omni_proxy.config import Config


class RunDir:
    """Paths in one run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.link = folder / "link.sock"
        """The scheduler's socket for events and effects."""
        self.app = folder / "app.sock"
        """The scheduler's HTTP app."""
        self._config = folder / "config.json"
        self._reloads = folder / "reloads"

    def write_config(self, config: Config) -> None:
        """Leave the effective config for the children; whole or not at all."""
        part = self._config.with_suffix(".part")
        part.write_text(config.model_dump_json(), encoding="utf-8")
        part.replace(self._config)

    def write_reloads(self, generation: int, failed: int) -> None:
        """Leave for the scheduler's metrics which config is in force, and how many could not be used."""
        part = self._reloads.with_suffix(".part")
        part.write_text(f"{generation} {failed}", encoding="utf-8")
        part.replace(self._reloads)

    def read_reloads(self) -> tuple[int, int]:
        """Generation and failures; those of a start where nothing was loaded again."""
        try:
            generation, failed = self._reloads.read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return 1, 0
        return int(generation), int(failed)

    def read_config(self) -> Config:
        return Config.model_validate_json(self._config.read_text(encoding="utf-8"))
