"""A front process: the half that carries out, linked to a scheduler that may die and come back.

Streams never depend on the link: bytes go from the worker's socket to the client's in this process. While the link is
down, events wait; when it is back, the new scheduler first hears what the old one had placed here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Final, cast

from omni_proxy.access.shared import Counts
from omni_proxy.api.exchange import Exchange
from omni_proxy.config import Config
from omni_proxy.errors import ErrorCode
from omni_proxy.halves import Front
from omni_proxy.messages import Adopted, Arrived, Close, Event, Lease, Leg, Outcome, RequestRecord, RequestSpec
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.processes.link import Link
from omni_proxy.processes.pass_on import PassOn
from omni_proxy.processes.run_dir import RunDir
from omni_proxy.processes.words import EdgeRejected, FromScheduler, Goodbye, Hello, Members, front_decoder

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.05


class FrontProcess:
    """One front and its link. Made inside the event loop. Raises ConfigError."""

    def __init__(self, config: Config, run_dir: RunDir, slot: int = 0) -> None:
        self._run_dir = run_dir
        self._link: Link | None = None
        self._waiting: list[Event] = []
        """Events that no scheduler has heard: those of requests that the last one had placed come first."""
        self._lost_link = asyncio.Event()
        self._lost_link.set()
        self._has_members = asyncio.Event()
        self._pass_on = PassOn(run_dir.app)
        counts = Counts(run_dir.folder, max(config.processes, slot + 1), slot)
        self.front = Front(config, self._post, self._pass_on, self._rejected, self._news, counts)

    async def serve(self, sock: socket.socket, stop: asyncio.Event, force: asyncio.Event) -> None:
        """Serve clients on a listening socket until `stop`, then drain."""
        self._pass_on.end_streams_on(stop)
        try:
            await self.front.serve(sock, stop, force)
        finally:
            link, self._link = self._link, None
            if link is not None:
                link.send(Goodbye())
                link.close()
            await self._pass_on.close()

    async def linked(self) -> None:
        """Return when a scheduler is there and has told its members."""
        await self._has_members.wait()

    # ------------------------------------------------------------------- the link

    async def keep_linked(self) -> None:
        """Find the scheduler, and find it again whenever it is gone; runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._lost_link.wait()
            # A pause also before the first try: a scheduler that ends every link must not be asked without end.
            await asyncio.sleep(RECONNECT_S)
            try:
                _, made = await loop.create_unix_connection(self._new_protocol, str(self._run_dir.link))
            except OSError:
                continue
            self._lost_link.clear()
            self._begin(cast("Link", made))

    def _new_protocol(self) -> asyncio.Protocol:
        return cast("asyncio.Protocol", Link(front_decoder(), self._received, self._lost))

    def _begin(self, link: Link) -> None:
        """The first words to a scheduler: who we are, what runs here, what has happened since."""
        link.send(Hello(self.front.edge.prefix))
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            link.send(event)
        self._link = link

    def _lost(self, link: Link) -> None:
        if link is not self._link:
            return
        logger.warning("the scheduler is gone; %d requests go on without it", len(self.front.edge.exchanges))
        self._link = None
        self.front.edge.foresight.clear()
        self._waiting = [event for x in list(self.front.edge.exchanges.values()) if (event := self._as_it_stands(x))]
        self._lost_link.set()

    def _received(self, link: Link, messages: Sequence[FromScheduler]) -> None:
        perform = self.front.edge.perform
        for message in messages:
            if isinstance(message, Members):
                self.front.upstreams.set(message.members)
                self._has_members.set()
                continue
            try:
                perform(message)
            except Exception:
                logger.exception("the edge failed on %s", type(message).__name__)

    def _post(self, event: Event) -> None:
        if self._link is None:
            self._waiting.append(event)
        else:
            self._link.send(event)

    def _rejected(self, endpoint: str, error: str) -> None:
        if self._link is not None:
            self._link.send(EdgeRejected(endpoint, error))

    def _news(self, news: EdgeNews) -> None:
        if self._link is not None:
            self._link.send(news)

    # ------------------------------------------------------------ a scheduler has died

    def _as_it_stands(self, exchange: Exchange) -> Event | None:
        """What a new scheduler has to know of a request; None when it can be ended without one."""
        spec = exchange.spec
        if spec is None:
            return None
        leases = {leg.lease.leg: leg.lease for leg in exchange.legs.values()}
        if leases:
            return _adopted(exchange, spec, leases)
        if exchange.committed and (exchange.resumption is None or not exchange.resumption.resumed):
            self._end(exchange, spec)
            return None
        # Queued, being tokenised, or between its legs: from the start, nobody has seen anything of it. KV that P has
        # ready is given up when the next prefill starts. An answer that lost its worker goes on from where it is.
        return Arrived(exchange.rid, spec)

    def _end(self, exchange: Exchange, spec: RequestSpec) -> None:
        """The answer has ended, only its `Close` was lost."""
        complete = exchange.complete
        outcome = Outcome.COMPLETED if complete else Outcome.FAILED
        error = None if complete else ErrorCode.INTERNAL
        record = RequestRecord(
            rid=exchange.rid,
            external_id=spec.external_id,
            model=spec.model,
            endpoint=spec.endpoint,
            stream=spec.stream,
            mode=None,
            marks=(),
            prefill_done_at=None,
            first_token_at=None,
            outcome=outcome,
            error=error,
            detail="The scheduler was restarted.",
            placements=(),
            attempts=0,
            prompt_tokens=spec.prompt_tokens,
            cached_tokens=None,
            completion_tokens=None,
            encode_s=spec.encode_s,
        )
        self.front.edge.perform(Close(exchange.rid, outcome, record, error, record.detail))


def _adopted(exchange: Exchange, spec: RequestSpec, leases: dict[Leg, Lease]) -> Adopted:
    decode = leases.get(Leg.DECODE)
    return Adopted(
        rid=exchange.rid,
        spec=spec,
        prefill=leases.get(Leg.PREFILL),
        decode=decode,
        handoff_from=exchange.handoff_from if decode is not None else None,
        first_token=exchange.committed,
    )
