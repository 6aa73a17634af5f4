"""The config file read again while the gateway serves: what may change, what cannot, and how often it went well.

A file with a fault changes nothing. Knows which settings can change; how they do is each part's own business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omni_proxy.config import Config, ConfigError, load

logger = logging.getLogger(__name__)

CHANGEABLE: Final = frozenset(
    {
        "workers",
        "access",
        "limits",
        "scheduling",
        "timeouts",
        "keepalive",
        "health",
        "retries",
        "access_log",
        "prewarm",
        "resume",
        "discovery",
    }
)
"""All other sections stay as they were when the gateway started, as does the port of `discovery.registration`."""


def needs_restart() -> list[str]:
    """The sections of which a change is not taken over while the gateway runs."""
    return [name for name in Config.model_fields if name not in CHANGEABLE]


class Reloads:
    """The config in force. `check` raises ConfigError for what only shows when a config is put to use."""

    def __init__(self, path: Path, config: Config, check: Callable[[Config], None]) -> None:
        self.config = config
        self.generation = 1
        """Counts the configs that were in force."""
        self.failed = 0
        self._path = path
        self._check = check

    def again(self) -> Config | None:
        """Read the file again; the config in force from now on, or None when it cannot be used."""
        try:
            wanted = load(self._path)
            self._check(wanted)
        except ConfigError as exc:
            self.failed += 1
            for line in str(exc).splitlines():
                logger.error("the config is not loaded again, the old one stays: %s", line)
            return None
        before, self.config = self.config, self._possible(wanted)
        self.generation += 1
        changed = [name for name in Config.model_fields if getattr(before, name) != getattr(self.config, name)]
        said = ", ".join(changed) or "nothing"
        logger.info("the config was loaded again (generation %d); changed: %s", self.generation, said)
        return self.config

    def _possible(self, wanted: Config) -> Config:
        fixed = {name: getattr(self.config, name) for name in Config.model_fields if name not in CHANGEABLE}
        for name, value in fixed.items():
            if getattr(wanted, name) != value:
                logger.warning("%s: a change needs a restart, the old setting stays", name)
        port = self.config.discovery.registration
        if wanted.discovery.registration != port:
            logger.warning("discovery.registration: a change needs a restart, the old setting stays")
        discovery = wanted.discovery.model_copy(update={"registration": port})
        return wanted.model_copy(update={**fixed, "discovery": discovery})


async def reload_whenever(asked: asyncio.Event, reloads: Reloads, apply: Callable[[Config | None], None]) -> None:
    """Load the config again each time somebody asks; runs until cancelled.

    The file is read in a thread: streams go on meanwhile. `apply` runs on the event loop; None: there is no new config.
    """
    while True:
        await asked.wait()
        asked.clear()
        try:
            apply(await asyncio.to_thread(reloads.again))
        except Exception:
            logger.exception("a config was not put to use")
