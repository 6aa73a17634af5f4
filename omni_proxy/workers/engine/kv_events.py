"""Publishes the prefix cache's events over ZeroMQ, numbered, and sends the last ones again to who missed some.

    PUB     [topic, number (8 bytes, big endian), batch]
    ROUTER  asked with [b"", first number], answers [b"", topic, number, batch] ... [b"", b"", -1, b""]

A thread of its own owns both sockets; the engine's thread only hands batches over.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, Final

import zmq

log = logging.getLogger(__name__)

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 64 << 20
TOPIC: Final = b""
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SEND_HWM: Final = 100_000
_STOP: Final = b""


class KvEventPublisher:
    """Binds at construction (OSError if that fails); `send` from one thread only, others at any time."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0 lets the system choose; the replay's port always is the system's choice."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for sock in (self._pub, self._replay, self._inbox, self._outbox):
            sock.setsockopt(zmq.SNDHWM, _SEND_HWM)
            sock.setsockopt(zmq.RCVHWM, _SEND_HWM)
            sock.setsockopt(zmq.LINGER, 0)
        try:
            self.endpoint: Final = _bind(self._pub, host, port)
            self.replay_endpoint: Final = _bind(self._replay, host, 0)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise OSError(f"cannot publish KV events on {host}:{port}: {exc.strerror}") from exc
        self._inbox.bind(f"inproc://kv-events-{id(self)}")
        self._outbox.connect(f"inproc://kv-events-{id(self)}")
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._thread = threading.Thread(target=self._main, name="kv events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, batch: bytes) -> None:
        """Publish a batch; it gets the next number."""
        self._outbox.send(batch)

    def stop(self) -> None:
        """End the thread and close the sockets. Idempotent; nobody may be in `send`."""
        if self._context.closed:
            return
        if self._thread.is_alive():
            self._outbox.send(_STOP)
            self._thread.join()
        self._context.destroy(linger=0)

    def source(self) -> dict[str, Any]:
        """One entry of `/kv_event_sources`, as vLLM writes it."""
        return {
            "data_parallel_rank": 0,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": TOPIC.decode(),
        }

    # -- the thread

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                batch = self._inbox.recv()
                if batch == _STOP:
                    return
                self._publish(batch)
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())

    def _publish(self, batch: bytes) -> None:
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((TOPIC, number, batch))

    def _answer(self, request: list[bytes]) -> None:
        """Send again what is kept from a number on. A request that makes no sense is not answered."""
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a request for past KV events makes no sense")
            return
        peer, first = request[0], int.from_bytes(request[2], "big")
        for number, batch in self._kept:
            if int.from_bytes(number, "big") >= first:
                self._replay.send_multipart((peer, b"", TOPIC, number, batch))
        self._replay.send_multipart((peer, b"", b"", _END, b""))


def _bind(sock: zmq.Socket[bytes], host: str, port: int) -> str:
    """Bind and return the endpoint that others connect to."""
    literal = f"[{host}]" if ":" in host else host
    if ":" in host:
        sock.setsockopt(zmq.IPV6, 1)
    sock.bind(f"tcp://{literal}:{port or '*'}")
    endpoint = sock.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
