"""Hears what workers publish about their caches, and brings it to the core. ZeroMQ lives here and nowhere inward.

Each publisher (one for each data-parallel rank of a worker) has a subscription: a socket for its stream, a monitor that
tells when its connection breaks, and replays for what was missed. What messages mean is `apc.feed`'s business. A peer
may send anything at any rate: sockets hold a bounded number of bounded messages, and all subscriptions together get a
bounded share of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

import zmq
import zmq.asyncio
from msgspec import Struct, structs

from omni_proxy.apc.feed import Change, Feed, FeedCounts, FeedReading
from omni_proxy.workers.member import Member

logger = logging.getLogger(__name__)

CHECK_S: Final = 2.0
"""How often a quiet publisher is asked whether something was missed."""
REPLAY_STEP_S: Final = 2.0
"""Longest wait for the next message of a replay."""
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_WAITING: Final = 4096
"""Messages that a socket holds."""
REPORT_S: Final = 60.0
_SHARE: Final = 0.25
_SLICE_S: Final = 0.005
_END: Final = (-1).to_bytes(8, "big", signed=True)
_BAD: Final = ("gaps", "lost", "malformed", "overflows")

Post = Callable[[Change], None]


class Source(Struct, frozen=True):
    """Where one cache's events are published."""

    worker: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0


class Pace:
    """Keeps the work for all subscriptions together below a share of the event loop's time."""

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._turn = asyncio.Lock()
        self._owed = 0.0
        self._at = time.monotonic()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Do one message's work inside; waits where the share is used up."""
        async with self._turn:
            begin = time.monotonic()
            self._owed = max(0.0, self._owed - (begin - self._at) * self._share)
            if self._owed > _SLICE_S:
                await asyncio.sleep((self._owed - _SLICE_S) / self._share)
                self._owed, begin = _SLICE_S, time.monotonic()
            yield
            self._at = time.monotonic()
            self._owed += self._at - begin


class Subscription:
    """One publisher's stream, for as long as `run` runs."""

    def __init__(self, source: Source, post: Post, pace: Pace, context: zmq.asyncio.Context) -> None:
        self.source = source
        self.feed = Feed(source.worker, source.rank)
        self.connected = False
        self.strange = 0
        self.lag_s: float | None = None
        """How long the last message was on its way."""
        """Messages that are not of three frames with a number."""
        self._post = post
        self._pace = pace
        self._context = context
        self._missed = asyncio.Event()
        self._reported = FeedCounts()
        self._reported_at = float("-inf")

    async def run(self) -> None:
        """Listen until cancelled. What the worker's cache holds is forgotten then."""
        sock = self._context.socket(zmq.SUB)
        try:
            sock.setsockopt(zmq.RCVHWM, MAX_WAITING)
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.RECONNECT_IVL, 100)
            sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
            sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
            sock.setsockopt_string(zmq.SUBSCRIBE, self.source.topic)
            monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            sock.connect(self.source.endpoint)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(monitor))
                group.create_task(self._listen(sock))
                group.create_task(self._mend())
        finally:
            sock.disable_monitor()
            sock.close(linger=0)
            self._tell(self.feed.restarted())

    # ------------------------------------------------------------------- the stream

    async def _listen(self, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            async with self._pace.slot():
                number = _number(frames)
                if number is None:
                    self.strange += 1
                else:
                    self._tell(self.feed.hear(number, frames[2]))
                    self._note_lag()
            if self.feed.wants is not None:
                self._missed.set()

    def _note_lag(self) -> None:
        if self.feed.wants is None and self.feed.sent_at is not None:
            self.lag_s = time.time() - self.feed.sent_at

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A connection that breaks or begins may hide another publisher behind the same address."""
        while True:
            frames = await monitor.recv_multipart()
            event = int.from_bytes(frames[0][:2], "little")
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not self.connected:
                self._tell(self.feed.restarted())
            else:
                self.feed.check()
                self._missed.set()

    async def _mend(self) -> None:
        """Fetch what was missed, when a gap shows it and now and then without one."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._missed.wait()
            self._missed.clear()
            if self.connected and self.source.replay_endpoint is not None:
                self.feed.check()
            if self.feed.wants is not None:
                if self.connected:
                    await self._replay(self.feed.wants)
                self._tell(self.feed.replay_ended())
            self._report()

    async def _replay(self, start: int) -> None:
        if self.source.replay_endpoint is None:
            return
        sock = self._context.socket(zmq.DEALER)
        try:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.RCVHWM, MAX_WAITING)
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            sock.connect(self.source.replay_endpoint)
            with contextlib.suppress(TimeoutError):
                await self._ask(sock, start)
        finally:
            sock.close(linger=0)

    async def _ask(self, sock: zmq.asyncio.Socket, start: int) -> None:
        async with asyncio.timeout(REPLAY_STEP_S) as limit:
            await sock.send_multipart((b"", start.to_bytes(8, "big")))
            loop = asyncio.get_running_loop()
            while True:
                frames = await sock.recv_multipart()
                limit.reschedule(loop.time() + REPLAY_STEP_S)
                number, payload = frames[-2:] if len(frames) >= 2 else (b"", b"")
                if number == _END or self.feed.wants is None:
                    return
                if len(number) != 8:
                    self.strange += 1
                    continue
                async with self._pace.slot():
                    self._tell(self.feed.replayed(int.from_bytes(number, "big"), payload))
                limit.reschedule(loop.time() + REPLAY_STEP_S)

    # ---------------------------------------------------------------------- telling

    def _tell(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._post(change)

    def _report(self) -> None:
        """Say what went wrong, at most once a minute."""
        now = time.monotonic()
        counts = self.feed.counts
        new = {name: getattr(counts, name) - getattr(self._reported, name) for name in _BAD}
        if self.strange or any(new.values()):
            if now - self._reported_at < REPORT_S:
                return
            self._reported_at, self._reported = now, structs.replace(counts)
            said = ", ".join(f"{count} {name}" for name, count in new.items() if count)
            logger.warning(
                "KV events of %s (rank %d): %s", self.source.worker, self.source.rank, said or "strange messages"
            )


def _number(frames: Sequence[bytes]) -> int | None:
    """The number of a message [topic, number, payload]; None for anything else."""
    return int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == 8 else None


class KvEvents:
    """All subscriptions. `set` says which there are to be; each endpoint belongs to the worker that claims it first."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._context: zmq.asyncio.Context | None = None
        self._pace = Pace()
        self._running: dict[Source, tuple[Subscription, asyncio.Task[None]]] = {}
        self.refused = 0
        """Sources whose endpoint another worker has."""

    def subscriptions(self) -> list[Subscription]:
        """What is listened to, by worker and rank."""
        found = (subscription for subscription, _ in self._running.values())
        return sorted(found, key=lambda s: (s.source.worker, s.source.rank))

    def readings(self) -> list[FeedReading]:
        """How each subscription fares."""
        return [
            FeedReading(
                s.source.worker,
                s.source.rank,
                s.connected,
                s.feed.counts,
                s.feed.translator.unknown_parents,
                s.lag_s,
            )
            for s in self.subscriptions()
        ]

    def set(self, worker: str, sources: Sequence[Source]) -> None:
        """Listen to these sources of a worker, and to no others of it."""
        for source in [s for s in self._running if s.worker == worker and s not in sources]:
            _, task = self._running.pop(source)
            task.cancel()
        for source in sources:
            if source not in self._running and self._may_have(source):
                if self._context is None:
                    self._context = zmq.asyncio.Context()
                subscription = Subscription(source, self._post, self._pace, self._context)
                task = asyncio.create_task(subscription.run(), name=f"KV events of {worker}")
                task.add_done_callback(_ended)
                self._running[source] = (subscription, task)

    def keep(self, members: Iterable[Member]) -> None:
        """Listen to nobody who is no member."""
        names = {member.name for member in members}
        for worker in {source.worker for source in self._running} - names:
            self.set(worker, ())

    async def close(self) -> None:
        """Listen to nobody any more."""
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _may_have(self, source: Source) -> bool:
        owner = next((s.worker for s in self._running if s.endpoint == source.endpoint), None)
        if owner is None:
            return True
        self.refused += 1
        logger.warning("KV events: %s claims %s, which is %s's", source.worker, source.endpoint, owner)
        return False


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s has ended", task.get_name(), exc_info=task.exception())
