"""KV blocks over ZeroMQ: the thread that serves leased blocks and the thread that pulls them.

Each message is one JSON header and, for a piece, the bytes of whole blocks. The rules are `leases.py` (what is served) and
`pull.py` (what is accepted); here are only sockets and threads. Knows nothing of plans or of the model.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import zmq

from omni_proxy.workers.engine.leases import Claim, Lease, LeaseBook, Refusal
from omni_proxy.workers.engine.pull import Header, Pull, PullState, claim_header, piece_crc

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 20
MAX_READ_BYTES: Final = 64 << 20
LINGER_MS: Final = 1000
_POLL_MS: Final = 1000

Export = Callable[[Sequence[int]], memoryview]


def blocks_per_piece(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


def _endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


def _pack(header: Header) -> bytes:
    return json.dumps(header).encode()


def _unpack(frame: bytes | memoryview) -> Header | None:
    try:
        header = json.loads(bytes(frame))
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


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
    ) -> None:
        """`on_end` hears of leases that a puller has ended. Binds at once; OSError if it cannot."""
        self._book = book
        self._lock = threading.Lock()
        self._export = export
        self._block_bytes = block_bytes
        self._on_end = on_end
        self.bytes_sent = 0
        self.transfers = 0
        self.refusals = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = _socket(self._context, zmq.ROUTER)
        try:
            self._router.bind(_endpoint(host, port or "*"))
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
        """End the thread, if it was started, and close the socket."""
        self._stopping.set()
        if self._thread.is_alive():
            with zmq.Context() as context, context.socket(zmq.DEALER) as waker:
                waker.linger = 100
                waker.connect(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
                waker.send(b"")
                self._thread.join(_POLL_MS / 1000 + 1)
        self.close()

    def close(self) -> None:
        self._router.close(linger=0)
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
        while not self._stopping.is_set():
            if not self._router.poll(_POLL_MS):
                continue
            peer, *frames = self._router.recv_multipart()
            header = _unpack(frames[0]) if frames else None
            if header is None:
                continue
            try:
                answer = self._answer(header)
            except Exception:
                log.exception("KV request failed: %.200r", header)
                answer = [_pack({"kind": "refused", "reason": "internal error"})]
            if answer:
                self._router.send_multipart([peer, *answer], copy=False)

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
        return [_pack({"kind": "refused", "reason": reason})]

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
        return [_pack({"kind": "opened", "serial": lease.serial})]

    def _read(self, header: Header) -> list[bytes | memoryview]:
        request_id = header.get("request_id")
        numbers = [header.get(name) for name in ("serial", "seq", "first", "count")]
        serial, seq, first, count = (n if isinstance(n, int) else -1 for n in numbers)
        with self._lock:
            lease = self._book.read(str(request_id), serial, time.monotonic())
            if isinstance(lease, Refusal):
                return self._refuse(lease.reason)
            inside = 0 <= first and 0 < count <= len(lease.block_ids) - first
            if not inside or (count > 1 and count * self._block_bytes > MAX_READ_BYTES):
                return self._refuse(f"request {request_id} has no blocks {first} + {count}")
            payload = self._export(lease.block_ids[first : first + count])
        self.bytes_sent += len(payload)
        crc = piece_crc(serial, seq, first, count, payload)
        piece: Header = {"kind": "piece", "serial": serial, "seq": seq, "first": first}
        return [_pack({**piece, "count": count, "crc": crc}), payload]

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


class KvPuller:
    """Runs `Pull` machines over DEALER sockets, one each, in its own thread.

    `start_pull`, `cancel` and `release` are called from one thread only. `on_end` gets each pull that is DONE or FAILED, from
    the puller's thread; a cancelled one is not heard of again.
    """

    def __init__(self, on_end: Callable[[Pull], None]) -> None:
        self._on_end = on_end
        self.bytes_received = 0
        self.transfers = 0
        self.failures = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.bind("inproc://wake")
        self._pulls: dict[Pull, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kv-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Drop all pulls, end the thread and close the sockets. From the calling thread of the others, or after it."""
        if self._thread.is_alive():
            self._command(self._drop_all)
            self._thread.join(_POLL_MS / 1000 + 1)
        self._waker.close(linger=0)
        self._context.term()

    def start_pull(self, pull: Pull, host: str, port: int) -> None:
        self._command(lambda: self._begin(pull, host, port))

    def cancel(self, pull: Pull) -> None:
        self._command(lambda: self._forget(pull))

    def release(self, claim: Claim, host: str, port: int) -> None:
        """Tell the keeper that nobody will pull. Best effort: the lease ends by itself otherwise."""
        self._command(lambda: self._send_release(claim, host, port))

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.send(b"")

    # -- the thread

    def _loop(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect("inproc://wake")
        self._poller.register(wake, zmq.POLLIN)
        while not self._stopping:
            for socket, _ in self._poller.poll(self._wait_ms()):
                if socket is wake:
                    wake.recv()
            self._run_commands()
            for pull, socket in list(self._pulls.items()):
                self._step(pull, socket)
        wake.close(linger=0)

    def _wait_ms(self) -> int:
        ticks = [pull.next_tick for pull in self._pulls]
        wait_s = min(ticks, default=time.monotonic() + 60) - time.monotonic()
        return max(0, int(wait_s * 1000)) + 1

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _begin(self, pull: Pull, host: str, port: int) -> None:
        socket = _socket(self._context, zmq.DEALER)
        try:
            socket.connect(_endpoint(host, port))
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            pull.give_up(f"cannot reach {host}:{port}: {exc}")
            self._end(pull)
            return
        self._poller.register(socket, zmq.POLLIN)
        self._pulls[pull] = socket
        self._send(socket, pull.begin())

    def _step(self, pull: Pull, socket: zmq.Socket[bytes]) -> None:
        """Feed what has come, then the clock; end the pull if it is over."""
        while pull.state not in (PullState.DONE, PullState.FAILED) and socket.poll(0):
            frames = socket.recv_multipart(copy=False)
            header = _unpack(frames[0].buffer)
            payload = frames[1].buffer if len(frames) > 1 else None
            if header is not None:
                self._send(socket, pull.receive(header, payload, time.monotonic()))
        self._send(socket, pull.tick(time.monotonic()))
        if pull.state in (PullState.DONE, PullState.FAILED):
            self._forget(pull)
            self._end(pull)

    def _end(self, pull: Pull) -> None:
        if pull.state is PullState.DONE:
            self.transfers += 1
            self.bytes_received += sum(len(piece) for piece in pull.pieces)
        else:
            self.failures += 1
        self._on_end(pull)

    def _send(self, socket: zmq.Socket[bytes], headers: Sequence[Header]) -> None:
        for header in headers:
            socket.send(_pack(header))

    def _forget(self, pull: Pull) -> None:
        """Close the pull's socket; what is still to be sent (`done`) goes out, what still comes is dropped."""
        socket = self._pulls.pop(pull, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def _send_release(self, claim: Claim, host: str, port: int) -> None:
        socket = _socket(self._context, zmq.DEALER)
        try:
            socket.connect(_endpoint(host, port))
            socket.send(_pack(claim_header("release", claim)))
        except zmq.ZMQError as exc:
            log.warning("cannot release KV at %s:%s: %s", host, port, exc)
        socket.close()

    def _drop_all(self) -> None:
        self._stopping = True
        for pull in list(self._pulls):
            self._forget(pull)
