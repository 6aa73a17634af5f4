"""The puller's half of a KV handoff: a thread that runs `Pull` and `Inflow` machines over sockets.

What is accepted is the machine's decision; here are only sockets and a clock. Knows nothing of plans or of the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import zmq

from omni_proxy.workers.engine.inflow import Inflow
from omni_proxy.workers.engine.kv_wire import JOIN_S, Context, Socket, endpoint, open_pair, open_socket, pack, unpack
from omni_proxy.workers.engine.pull import Header, Pull, PullState

log = logging.getLogger(__name__)

Transfer = Pull | Inflow
"""KV on its way to us: read by us, or pushed by the other side."""


class KvPuller:
    """Runs `Pull` and `Inflow` machines over DEALER sockets, one each, in its own thread.

    `start_pull`, `cancel` and `release` are called from one thread only. `on_end` gets each pull that is DONE or
    FAILED, from the puller's thread; a cancelled one is not heard of again.
    """

    def __init__(self, on_end: Callable[[Transfer], None]) -> None:
        self._on_end = on_end
        self.bytes_received = 0
        self.transfers = 0
        self.failures = 0
        self._context: Context = zmq.Context()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waker, self._wake = open_pair(self._context)
        self._pulls: dict[Transfer, Socket] = {}
        self._poller = zmq.Poller()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kv-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Drop all pulls, end the thread and close the sockets. From the calling thread of the others, or after it."""
        if self._thread.is_alive():
            self._command(self._drop_all)
            self._thread.join(JOIN_S)
        self._waker.close(linger=0)
        self._wake.close(linger=0)
        self._context.term()

    def start_pull(self, pull: Transfer, host: str, port: int) -> None:
        self._command(lambda: self._begin(pull, host, port))

    def cancel(self, pull: Transfer) -> None:
        self._command(lambda: self._cancel(pull))

    def tell(self, header: Header, host: str, port: int) -> None:
        """Tell the keeper that nobody will pull. Best effort: the lease ends by itself otherwise."""
        self._command(lambda: self._send_once(header, host, port))

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.send(b"")

    # -- the thread

    def _loop(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        while not self._stopping:
            for socket, _ in self._poller.poll(self._wait_ms()):
                if socket is self._wake:
                    self._wake.recv()
            self._run_commands()
            for pull, socket in list(self._pulls.items()):
                self._step(pull, socket)

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

    def _begin(self, pull: Transfer, host: str, port: int) -> None:
        socket = open_socket(self._context, zmq.DEALER)
        try:
            socket.connect(endpoint(host, port))
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            pull.give_up(f"cannot reach {host}:{port}: {exc}")
            self._end(pull)
            return
        self._poller.register(socket, zmq.POLLIN)
        self._pulls[pull] = socket
        self._send(socket, pull.begin())

    def _step(self, pull: Transfer, socket: Socket) -> None:
        """Move one pull on, and end it if it is over."""
        try:
            self._feed(pull, socket)
        except Exception as exc:
            log.exception("the pull for %s broke", pull.request_id)
            pull.give_up(f"{type(exc).__name__}: {exc}")
        if pull.state in (PullState.DONE, PullState.FAILED):
            self._forget(pull)
            self._end(pull)

    def _feed(self, pull: Transfer, socket: Socket) -> None:
        """What has come, then the clock."""
        while pull.state not in (PullState.DONE, PullState.FAILED) and socket.poll(0):
            frames = socket.recv_multipart(copy=False)
            header = unpack(frames[0].buffer)
            payload = frames[1].buffer if len(frames) > 1 else None
            if header is not None:
                self._send(socket, pull.receive(header, payload, time.monotonic()))
        self._send(socket, pull.tick(time.monotonic()))

    def _end(self, pull: Transfer) -> None:
        if pull.state is PullState.DONE:
            self.transfers += 1
            self.bytes_received += pull.num_bytes
        else:
            self.failures += 1
        self._on_end(pull)

    def _send(self, socket: Socket, headers: Sequence[Header]) -> None:
        for header in headers:
            socket.send(pack(header), zmq.DONTWAIT)

    def _forget(self, pull: Transfer) -> None:
        """Close the pull's socket; what is still to be sent (`done`) goes out, what still comes is dropped."""
        socket = self._pulls.pop(pull, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def _cancel(self, pull: Transfer) -> None:
        socket = self._pulls.get(pull)
        if socket is not None:
            self._send(socket, pull.cancelled())
        self._forget(pull)

    def _send_once(self, header: Header, host: str, port: int) -> None:
        socket = open_socket(self._context, zmq.DEALER)
        try:
            socket.connect(endpoint(host, port))
            socket.send(pack(header))
        except zmq.ZMQError as exc:
            log.warning("cannot release KV at %s:%s: %s", host, port, exc)
        socket.close()

    def _drop_all(self) -> None:
        self._stopping = True
        for pull in list(self._pulls):
            self._forget(pull)
