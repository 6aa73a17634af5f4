"""The keeper's half of a KV handoff: a thread that serves leased blocks.

What is served is the lease book's decision; here are only the socket, the lock and the thread. Knows nothing of plans
or of the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from omni_proxy.workers.engine.kv_pusher import KINDS, Frames, KvPusher
from omni_proxy.workers.engine.kv_wire import JOIN_S, Context, endpoint, open_pair, open_socket, pack, unpack
from omni_proxy.workers.engine.leases import Claim, Lease, LeaseBook, Refusal
from omni_proxy.workers.engine.pull import Header, piece_crc

log = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 64 << 20
"""The most that one read may ask for, unless it is a single block."""
MAX_REQUEST_BYTES: Final = 16 << 20
"""The longest message from a puller; a claim names its blocks."""

Export = Callable[[Sequence[int]], memoryview]
"""Block ids -> a copy of their bytes, block by block."""


def parse_claim(header: Header) -> Claim | None:
    """A claim as `claim_header` writes it; None for anything else."""
    ids, layout, tokens = (header.get(n) for n in ("block_ids", "layout", "num_tokens"))
    names = [header.get(n) for n in ("engine_id", "request_id", "prompt_digest")]
    if not isinstance(ids, list) or not isinstance(layout, dict) or not isinstance(tokens, int):
        return None
    engine_id, request_id, digest = (n if isinstance(n, str) else None for n in names)
    if engine_id is None or request_id is None or digest is None:
        return None
    blocks = tuple(b for b in ids if isinstance(b, int))
    shape = {k: v for k, v in layout.items() if isinstance(v, str | int)}
    return Claim(engine_id, request_id, blocks, tokens, digest, shape)


class KvServer:
    """Serves the blocks of a `LeaseBook` on a ROUTER socket, from its own thread.

    All access to the book goes through here, under one lock that is also held while a piece is copied:
    a lease that has ended is never read, and one being read does not end meanwhile.
    """

    def __init__(
        self,
        book: LeaseBook,
        export: Export,
        block_bytes: int,
        on_end: Callable[[str], None],
        host: str,
        port: int,
        pusher: KvPusher,
    ) -> None:
        """`on_end` hears of leases that a puller has ended. Binds at once; OSError if it cannot."""
        self._book = book
        self._lock = threading.Lock()
        self._export = export
        self._block_bytes = block_bytes
        self._on_end = on_end
        self._pusher = pusher
        self.bytes_sent = 0
        self.transfers = 0
        self.refusals = 0
        self._context: Context = zmq.Context()
        self._router = open_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._waker, self._wake = open_pair(self._context)
        try:
            self._router.bind(endpoint(host, port or "*"))
        except zmq.ZMQError as exc:
            self.close()
            raise OSError(f"cannot serve KV on {host}:{port}: {exc}") from exc
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rsplit(":", 1)[1])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if it was started, and close the sockets."""
        self._stopping.set()
        if self._thread.is_alive():
            self._waker.send(b"")
            self._thread.join(JOIN_S)
        self.close()

    def close(self) -> None:
        for socket in (self._router, self._waker, self._wake):
            socket.close(linger=0)
        self._context.term()

    # -- the book, from the engine's thread

    def grant(self, request_id: str, blocks: tuple[int, ...], tokens: int, digest: str) -> Lease:
        with self._lock:
            return self._book.grant(request_id, blocks, tokens, digest, time.monotonic())

    def end(self, request_id: str) -> bool:
        """Release a lease; False if there is none."""
        with self._lock:
            return self._book.close(request_id)

    def expire(self) -> list[str]:
        with self._lock:
            return self._book.expire(time.monotonic())

    def next_expiry(self) -> float | None:
        with self._lock:
            return self._book.next_expiry()

    def holds(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._book

    # -- the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pusher.progress.fd, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll())
            if self._pusher.progress.fd in ready:
                self._pusher.progress.drain()
            if self._router in ready:
                peer, *frames = self._router.recv_multipart()
                header = unpack(frames[0]) if frames else None
                if header is not None:
                    self._send(self._answer_safely(peer, header))
            self._send(self._pusher.take())

    def _send(self, messages: list[Frames]) -> None:
        for peer, frames in messages:
            self._router.send_multipart([peer, *frames], copy=False)

    def _answer_safely(self, peer: bytes, header: Header) -> list[Frames]:
        try:
            if self._is_about_room(header):
                return self._about_room(peer, header)
            answer = self._answer(header)
        except Exception:
            log.exception("a KV request failed: %.200r", header)
            answer = [pack({"kind": "refused", "reason": "internal error"})]
        return [(peer, answer)] if answer else []

    def _is_about_room(self, header: Header) -> bool:
        kind = header.get("kind")
        return isinstance(kind, str) and (kind in KINDS or (kind == "done" and "room" in header))

    def _about_room(self, peer: bytes, header: Header) -> list[Frames]:
        room = header.get("room")
        request_id = self._pusher.request_of(room)
        if request_id is not None:  # its receiver is at work: what it reads stays
            with self._lock:
                self._book.touch(request_id, time.monotonic())
        return self._pusher.handle(peer, header)

    def _answer(self, header: Header) -> list[bytes | memoryview]:
        match header.get("kind"):
            case "open":
                return self._open(header)
            case "read":
                return self._read(header)
            case "done":
                return self._done(header)
            case "release":
                return self._release(header)
            case other:
                return self._refuse(f"unknown kind {other!r}")

    def _refuse(self, reason: str) -> list[bytes | memoryview]:
        self.refusals += 1
        log.warning("KV pull refused: %s", reason)
        return [pack({"kind": "refused", "reason": reason})]

    def _claimed(self, header: Header) -> Lease | Refusal:
        claim = parse_claim(header)
        if claim is None:
            return Refusal("malformed claim")
        with self._lock:
            return self._book.open(claim, time.monotonic())

    def _open(self, header: Header) -> list[bytes | memoryview]:
        lease = self._claimed(header)
        if isinstance(lease, Refusal):
            return self._refuse(lease.reason)
        return [pack({"kind": "opened", "serial": lease.serial})]

    def _read(self, header: Header) -> list[bytes | memoryview]:
        request_id = header.get("request_id")
        numbers = [header.get(name) for name in ("serial", "seq", "first", "count")]
        serial, seq, first, count = (n if isinstance(n, int) else -1 for n in numbers)
        with self._lock:
            lease = self._book.read(str(request_id), serial, time.monotonic())
            if isinstance(lease, Refusal):
                return self._refuse(lease.reason)
            inside = first >= 0 and 0 < count <= len(lease.block_ids) - first
            if not inside or (count > 1 and count * self._block_bytes > MAX_READ_BYTES):
                return self._refuse(f"request {request_id} has no blocks {first} + {count}")
            payload = self._export(lease.block_ids[first : first + count])
        self.bytes_sent += len(payload)
        crc = piece_crc(serial, seq, first, count, payload)
        piece: Header = {"kind": "piece", "serial": serial, "seq": seq, "first": first}
        return [pack({**piece, "count": count, "crc": crc}), payload]

    def _done(self, header: Header) -> list[bytes | memoryview]:
        request_id, serial = str(header.get("request_id")), header.get("serial")
        with self._lock:
            ended = self._book.close(request_id, serial if isinstance(serial, int) else -1)
        if ended:
            self.transfers += 1
            self._on_end(request_id)
        return []

    def _release(self, header: Header) -> list[bytes | memoryview]:
        """A puller that will not pull: the claim must match all the same."""
        lease = self._claimed(header)
        if isinstance(lease, Lease):
            with self._lock:
                ended = self._book.close(lease.request_id, lease.serial)
            if ended:
                self._on_end(lease.request_id)
        return []
