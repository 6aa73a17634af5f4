"""The way to the other gateways: a key with a lease for each of them, and a channel, in one Redis or Valkey.

    omni:GROUP:gateway:NAME    its last report; expires when nobody renews it, so that one that starts learns who lives
    omni:GROUP:reports         channel: every report as it is made
    omni:GROUP:orders          hash: what operators have ordered, by worker
    omni:GROUP:ordered         channel: the worker whose order has changed

Nothing that serves requests waits for it. While it is gone this gateway schedules alone, and counts for how long; when
it is back they hear of each other again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from omni_proxy.messages import OthersHeard
from omni_proxy.replicas.report import VERSION, OtherGateways, Report

logger = logging.getLogger(__name__)

_TROUBLE: Final = (RedisError, OSError, TimeoutError, asyncio.TimeoutError)
_LATENCY_S: Final = 0.003
"""From one gateway to another through Redis, usually."""
_IO_S: Final = 2.0
_RETRY_S: Final = 0.25
_MOST_RETRY_S: Final = 2.0
_MOST_BYTES: Final = 4 << 20

Orders = Mapping[str, bytes]


class Link:
    """Keeps this gateway and the others in touch. Made inside the event loop; `run` is its task."""

    def __init__(
        self,
        url: str,
        group: str,
        name: str,
        report_s: float,
        lease_s: float,
        now: Callable[[], float],
        report: Callable[[float], Report],
        heard: Callable[[OthersHeard], None],
        ordered: Callable[[Orders], None] | None = None,
    ) -> None:
        self._prefix = f"omni:{group}:"
        self._name = name
        self._report_s = report_s
        self._lease_s = lease_s
        self._now = now
        self._report = report
        self._heard = heard
        self._ordered = ordered
        self.others: Final = OtherGateways(name, lease_s)
        self.connected = False
        self.failures = 0
        """Times that the connection was lost, or could not be had."""
        self.sent = 0
        self.received = 0
        self.malformed = 0
        self.alone_s = 0.0
        """How long there was no connection, in all."""
        self._lost_at = now()
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._said: Report | None = None
        self._said_at = 0.0
        self._decoder = msgspec.msgpack.Decoder(Report)
        no_retry = Retry(NoBackoff(), 0)  # trying again is done here, where it is counted
        self._redis = Redis.from_url(url, socket_timeout=_IO_S, socket_connect_timeout=_IO_S, retry=no_retry)

    def changed(self) -> None:
        """There may be something new to tell the others."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then says goodbye."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_in_touch(), name="replicas")
            tasks.create_task(self._tell_core(), name="replicas' view")

    async def close(self) -> None:
        """Tell the others that nothing is held here any more, if they can be reached."""
        try:
            async with asyncio.timeout(_IO_S):
                if self.connected:
                    await self._send(Report(VERSION, self._name, gone=True))
                    await self._redis.delete(self._key(self._name))
                await self._redis.aclose()
        except _TROUBLE as exc:
            logger.debug("no goodbye to the other gateways: %s", exc)

    async def order(self, worker: str, order: bytes | None) -> bool:
        """Leave an operator's order about a worker for all gateways, or take it back; False without a connection."""
        try:
            async with asyncio.timeout(_IO_S):
                if order is None:
                    await self._redis.hdel(self._prefix + "orders", worker)
                else:
                    await self._redis.hset(self._prefix + "orders", worker, order)
                await self._redis.publish(self._prefix + "ordered", worker)
        except _TROUBLE as exc:
            logger.warning("the other gateways do not hear of an order for %s: %s", worker, exc)
            return False
        return True

    def seconds_alone(self) -> float:
        """How long there was no connection, up to now."""
        return self.alone_s + (0.0 if self.connected else self._now() - self._lost_at)

    # -------------------------------------------------------------------- the connection

    async def _stay_in_touch(self) -> None:
        wait_s = _RETRY_S
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._prefix + "reports", self._prefix + "ordered")
                    await self._learn()
                    self._is_connected()
                    wait_s = _RETRY_S
                    await self._talk(channel)
            except* _TROUBLE as group:
                self._is_lost(group.exceptions[0])
            await asyncio.sleep(wait_s)
            wait_s = min(_MOST_RETRY_S, 2 * wait_s)

    def _is_connected(self) -> None:
        self.alone_s += self._now() - self._lost_at
        self.connected = True
        self._said = None
        self._changed.set()
        others = ", ".join(self.others.names()) or "none yet"
        logger.info("gateway %s is in touch with the others (%s)", self._name, others)

    def _is_lost(self, exc: BaseException) -> None:
        if self.connected:
            logger.warning("no connection to the other gateways, each goes on alone: %s", exc)
            self._lost_at = self._now()
        self.connected = False
        self.failures += 1

    async def _learn(self) -> None:
        """Who lives, and what has been ordered, before the first message."""
        keys = [key async for key in self._redis.scan_iter(match=self._key("*"), count=100)]
        for data in await self._redis.mget(keys) if keys else ():
            if isinstance(data, bytes):
                self._take(data, snapshot=True)
        await self._learn_orders()
        self._news.set()

    async def _learn_orders(self) -> None:
        if self._ordered is not None:
            raw = await self._redis.hgetall(self._prefix + "orders")
            known = ((w, o) for w, o in raw.items() if isinstance(w, bytes) and isinstance(o, bytes))
            self._ordered({worker.decode("utf-8", "replace"): order for worker, order in known})

    async def _talk(self, channel: PubSub) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(channel), name="replicas' reports")
            tasks.create_task(self._speak(), name="own reports")

    async def _listen(self, channel: PubSub) -> None:
        """Our own reports come back here, too: where even these stay away, the connection is dead."""
        reports = (self._prefix + "reports").encode()
        heard_at = self._now()
        while True:
            message: dict[str, Any] | None = await channel.get_message(
                ignore_subscribe_messages=True, timeout=self._lease_s
            )
            _obey_cancellation()
            if message is None:
                if self._now() - heard_at >= self._lease_s:
                    raise TimeoutError("nothing was heard for the time of a lease")
                continue
            heard_at = self._now()
            if message["channel"] == reports:
                self._take(message["data"])
            else:
                await self._learn_orders()

    def _take(self, data: bytes, snapshot: bool = False) -> None:
        try:
            if len(data) > _MOST_BYTES:
                raise msgspec.ValidationError("too large")
            report = self._decoder.decode(data)
        except msgspec.MsgspecError:
            self.malformed += 1
            return
        if report.gateway == self._name:
            return
        self.received += 1
        if snapshot:  # what it says of its past was told when it was made
            report = msgspec.structs.replace(report, served=(), homes=())
        if self.others.heard(report, self._now()):
            self._news.set()

    # ----------------------------------------------------------------------- own reports

    async def _speak(self) -> None:
        """Say what has changed, not too often; and say it again before the lease ends."""
        renew_s = self._lease_s / 4
        while True:
            try:
                async with asyncio.timeout(renew_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            report = self._report(self._now())
            if report.says_more(self._said) or self._now() - self._said_at >= renew_s:
                await self._send(report)
                _obey_cancellation()
            await asyncio.sleep(self._report_s)

    async def _send(self, report: Report) -> None:
        data = msgspec.msgpack.encode(report)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._key(self._name), data, px=int(self._lease_s * 1000))
            pipe.publish(self._prefix + "reports", data)
            await pipe.execute()
        self._said, self._said_at = report, self._now()
        self.sent += 1

    # --------------------------------------------------------------------- to the core

    async def _tell_core(self) -> None:
        """Hand on what is new at the pace of reports, and forget whoever has fallen silent."""
        while True:
            try:
                async with asyncio.timeout(self._lease_s / 4):
                    await self._news.wait()
            except TimeoutError:
                pass
            expired = self.others.expire(self._now())
            if expired:
                logger.warning("a gateway has fallen silent; left are: %s", ", ".join(self.others.names()) or "none")
            if self._news.is_set() or expired:
                self._news.clear()
                self._heard(self.others.event(self._now(), self._report_s + _LATENCY_S))
            await asyncio.sleep(self._report_s)

    def _key(self, name: str) -> str:
        return f"{self._prefix}gateway:{name}"


def _obey_cancellation() -> None:
    """The client library may swallow a cancellation that comes while it waits for a socket."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
