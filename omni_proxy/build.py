"""The composition root: puts the two halves of a gateway together.

`Scheduling` decides, `Front` carries out. In one process they call each other; with `processes: N` they are joined by
sockets (`omni_proxy.processes`).
"""

from __future__ import annotations

import asyncio
import socket

from omni_proxy.config import Config
from omni_proxy.halves.front import Front
from omni_proxy.halves.scheduling import Scheduling
from omni_proxy.reload import Reloads, reload_whenever


class Gateway:
    """Both halves in one process. Made inside the event loop that it runs on. Raises ConfigError.

    `pumps`: without it every byte of a stream passes through Python, as where the pump could not be built.
    """

    def __init__(self, config: Config, *, pumps: bool = True) -> None:
        self._config = config
        self.scheduling = scheduling = Scheduling(config)
        post = scheduling.driver.post
        tallies = scheduling.tallies
        counted, rejected = tallies.edge_counted, tallies.rejected_at_edge
        self.front = Front(config, post, scheduling.app, rejected, counted, pumps=pumps)
        scheduling.driver.connect(self.front.edge.perform)
        scheduling.membership.on_change(self.front.upstreams.set)

    async def serve(self, sock: socket.socket, stop: asyncio.Event, force: asyncio.Event) -> None:
        """Serve on a listening socket until `stop`, then drain; `force` ends that early."""
        for worker in self._config.workers:
            self.scheduling.membership.add(worker)
        draining = asyncio.create_task(self._drain_when(stop), name="draining")
        try:
            async with self.scheduling.serving_admin():
                await self.front.serve(sock, stop, force)
        finally:
            draining.cancel()
            await self.scheduling.close()

    async def follow(self, reloads: Reloads, asked: asyncio.Event) -> None:
        """Use what the config file says whenever somebody asks; runs until cancelled."""

        def apply(config: Config | None) -> None:
            self.scheduling.tallies.config_reloaded(reloads.generation, reloads.failed)
            if config is not None:
                self.front.configure(config)
                self.scheduling.configure(config)

        self.scheduling.reload_by(asked.set)
        await reload_whenever(asked, reloads, apply)

    async def _drain_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.scheduling.draining = True
