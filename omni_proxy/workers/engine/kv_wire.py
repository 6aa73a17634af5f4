"""Sockets and frames of the KV side channel: each message is a JSON header and, for a piece, the bytes of blocks.

What the messages mean is `pull.py` and `leases.py`.
"""

from __future__ import annotations

import json
from typing import Final

import zmq

from omni_proxy.workers.engine.pull import Header

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

LINGER_MS: Final = 1000
"""How long a closed socket still tries to send what it was given."""
JOIN_S: Final = 5.0
"""How long a thread of the side channel may take to end."""


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def open_socket(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


def open_pair(context: Context) -> tuple[Socket, Socket]:
    """Two ends in one process: what is sent into the first wakes a poll of the second."""
    waker, wake = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    waker.bind("inproc://wake")
    wake.connect("inproc://wake")
    return waker, wake


def pack(header: Header) -> bytes:
    return json.dumps(header).encode()


def unpack(frame: bytes | memoryview) -> Header | None:
    """The header in a frame from a stranger; None for anything else."""
    try:
        header = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None
