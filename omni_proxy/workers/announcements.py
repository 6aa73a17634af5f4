"""Workers that announce themselves, as vLLM's P2P NCCL connector does: `{"type", "http_address", "zmq_address"}` as
msgpack, from a DEALER to our ROUTER, again and again. One that is silent for too long has gone.

Anybody who reaches the socket can be a worker: it belongs on the workers' network.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct
from pydantic import ValidationError

from omni_proxy.config import Announcements, ConnectorName, Worker
from omni_proxy.workers.discovery.targets import why_not
from omni_proxy.workers.discovery.vetting import address

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 1024
MAX_MESSAGE_BYTES: Final = 4096
LOOK_S: Final = 0.5
"""How often somebody is looked for who has become silent, at most."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9]+")

Found = Callable[[Sequence[Worker]], None]


class _Hello(Struct):
    type: Literal["P", "D"]
    http_address: str
    zmq_address: str


_HELLO = msgspec.msgpack.Decoder(_Hello)


class _Present:
    __slots__ = ("at", "worker")

    def __init__(self, worker: Worker, at: float) -> None:
        self.worker = worker
        self.at = at


class AnnouncedWorkers:
    """Who has announced himself lately. `found` hears of all of them whenever one comes, goes or changes.

    Raises OSError where it cannot listen.
    """

    def __init__(self, config: Announcements, found: Found) -> None:
        self._config = config
        self._found = found
        self._present: dict[str, _Present] = {}
        """By the address at which they serve."""
        self.strange = 0
        """Messages that are no announcement."""
        self._context = zmq.asyncio.Context()
        self._sock = self._context.socket(zmq.ROUTER)
        self._sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.setsockopt(zmq.IPV6, 1)
        try:
            self._sock.bind(config.listen)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise OSError(exc.errno, exc.strerror) from exc
        self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Listen until cancelled."""
        logger.info("workers announce themselves at %s", self.endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(self._look())
        finally:
            self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            frames = await self._sock.recv_multipart()
            worker = self._read(frames[-1])
            if worker is None:
                self.strange += 1
                if self.strange == 1:
                    logger.warning("an announcement at %s is not understood: %r", self.endpoint, frames[-1][:200])
            else:
                self._came(worker)

    async def _look(self) -> None:
        """Forget those that are silent."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._config.expire_s / 4))
            oldest = time.monotonic() - self._config.expire_s
            silent = [url for url, present in self._present.items() if present.at < oldest]
            for url in silent:
                worker = self._present.pop(url).worker
                logger.warning("worker %s has not announced itself for %g s", worker.name, self._config.expire_s)
            if silent:
                self._tell()

    def _came(self, worker: Worker) -> None:
        present = self._present.get(worker.url)
        now = time.monotonic()
        if present is not None and present.worker == worker:
            present.at = now
        elif present is not None or len(self._present) < MAX_WORKERS:
            self._present[worker.url] = _Present(worker, now)
            self._tell()

    def _tell(self) -> None:
        self._found(sorted((present.worker for present in self._present.values()), key=lambda w: w.name))

    def _read(self, payload: bytes) -> Worker | None:
        """The worker that a message announces; None where it does not announce one."""
        try:
            said = _HELLO.decode(payload)
            worker = Worker.model_validate(
                {
                    "name": "p2p-" + _NOT_IN_NAMES.sub("-", said.http_address).strip("-"),
                    "url": f"http://{said.http_address}",
                    "role": "prefill" if said.type == "P" else "decode",
                    "connector": ConnectorName.VLLM_P2P_NCCL,
                    "kv_address": said.zmq_address,
                    "group": self._config.group,
                    "max_seqs": self._config.max_seqs,
                }
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValidationError):
            return None
        for host in (address(worker.url)[0], said.zmq_address.rpartition(":")[0].strip("[]")):
            if why_not(host, self._config.networks) is not None:
                return None
        return worker
