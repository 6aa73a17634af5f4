"""The scheduler process: the half that decides, for all fronts of one port.

Fronts come and go on a Unix socket. A front that is lost takes its clients with it, so its requests are cancelled and
their leases return at once. A second socket serves the app (metrics, timelines) for the fronts to pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvicorn

from omni_proxy.api.serving import QuietServer
from omni_proxy.config import Config
from omni_proxy.halves import Scheduling
from omni_proxy.messages import Abort, Effect, FrontLost, Prewarm, StartDecode, StartPrefill
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.processes.link import Link
from omni_proxy.processes.run_dir import RunDir
from omni_proxy.processes.words import EdgeRejected, FromFront, Goodbye, Hello, Members, scheduler_decoder
from omni_proxy.workers.member import Member

logger = logging.getLogger(__name__)

RID_PREFIX = 8
"""Characters of a request id that name its front."""


class SchedulerProcess:
    """One scheduler and the links of its fronts. Made inside the event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.scheduling = Scheduling(config)
        self.scheduling.driver.connect(self._perform)
        self.scheduling.membership.on_change(self._tell_members)
        self._links: dict[Link, str] = {}
        self._by_prefix: dict[str, Link] = {}
        self._leaving: set[Link] = set()

    async def serve(self, run_dir: RunDir, stop: asyncio.Event) -> None:
        """Serve fronts until `stop`."""
        for worker in self._config.workers:
            self.scheduling.membership.add(worker)
        server = await asyncio.get_running_loop().create_unix_server(self._new_protocol, str(run_dir.link))
        app = QuietServer(_app_config(self.scheduling.app, run_dir.app))
        serving = asyncio.create_task(app.serve(), name="app")
        try:
            async with self.scheduling.serving_admin():
                await stop.wait()
                self.scheduling.draining = True
        finally:
            server.close()
            for link in list(self._links):
                link.close()
            app.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            await self.scheduling.close()

    # ------------------------------------------------------------------- from fronts

    def _new_protocol(self) -> asyncio.Protocol:
        return cast("asyncio.Protocol", Link(scheduler_decoder(), self._received, self._lost))

    def _received(self, link: Link, messages: Sequence[FromFront]) -> None:
        post = self.scheduling.driver.post
        for message in messages:
            if isinstance(message, (Hello, Goodbye, EdgeRejected, EdgeNews)):
                self._told(link, message)
            else:
                post(message)

    def _told(self, link: Link, message: Hello | Goodbye | EdgeRejected | EdgeNews) -> None:
        """What is not for the core."""
        match message:
            case Hello(rid_prefix):
                self._welcome(link, rid_prefix)
            case Goodbye():
                self._leaving.add(link)
            case EdgeRejected(endpoint, error):
                self.scheduling.tallies.rejected_at_edge(endpoint, error)
            case EdgeNews():
                self.scheduling.tallies.edge_counted(message)

    def _welcome(self, link: Link, prefix: str) -> None:
        logger.info("front %s is here", prefix)
        self._links[link] = prefix
        self._by_prefix[prefix] = link
        link.send(Members(self.scheduling.membership.members()))

    def _lost(self, link: Link) -> None:
        prefix = self._links.pop(link, None)
        if prefix is not None and self._by_prefix.get(prefix) is link:
            del self._by_prefix[prefix]
            if link in self._leaving:
                logger.info("front %s has ended", prefix)
            else:
                logger.warning("front %s is gone; its requests are cancelled", prefix)
            self.scheduling.driver.post(FrontLost(prefix))
        self._leaving.discard(link)

    # --------------------------------------------------------------------- to fronts

    def _perform(self, effect: Effect) -> None:
        rid = effect.lease.rid if isinstance(effect, (StartPrefill, StartDecode, Abort, Prewarm)) else effect.rid
        link = self._by_prefix.get(rid[:RID_PREFIX])
        if link is not None:
            link.send(effect)

    def _tell_members(self, members: tuple[Member, ...]) -> None:
        for link in self._links:
            link.send(Members(members))


def _app_config(app: object, path: Path) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        uds=str(path),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )
