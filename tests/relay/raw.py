"""A client on a bare socket: for what proper clients refuse to send, and for seeing how a response ends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, cast

LIMIT = 1 << 20


@dataclass
class Response:
    """One response. `clean`: it ended as its framing promised."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    clean: bool = True

    def header(self, name: str) -> str | None:
        return next((value for n, value in self.headers if n == name), None)

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class RawClient:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, receive_buffer: int | None = None) -> RawClient:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=LIMIT))

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self.writer.transport)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """The next head, also of a 1xx."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = [(n.lower(), v) for n, v in (line.split(": ", 1) for line in lines)]
        return int(first.split(" ")[1]), headers

    async def response(self, bodyless: bool = False) -> Response:
        """The next response, as far as it comes."""
        status, headers = await self.head()
        found = dict(headers)
        if bodyless:
            return Response(status, headers, b"")
        if found.get("transfer-encoding") == "chunked":
            body, clean = await self._chunks()
        elif "content-length" in found:
            body, clean = await self._exactly(int(found["content-length"]))
        else:
            body, clean = await self.rest()
        return Response(status, headers, body, clean)

    async def _exactly(self, size: int) -> tuple[bytes, bool]:
        try:
            return await self.reader.readexactly(size), True
        except asyncio.IncompleteReadError as exc:
            return exc.partial, False

    async def _chunks(self) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while True:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                data = await self.reader.readexactly(size + 2)
                if size == 0:
                    return bytes(body), True
                body += data[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return bytes(body), False

    async def rest(self) -> tuple[bytes, bool]:
        """All until the connection ends; False: by a reset."""
        body = b""
        try:
            while data := await self.reader.read(1 << 16):
                body += data
        except ConnectionError:
            return body, False
        return body, True

    async def closed(self) -> bool:
        """Wait for the end of the connection, of whatever kind; nothing more may come before it."""
        return (await self.rest())[0] == b""

    def reset(self) -> None:
        """Leave as a killed client does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


def chat(**fields: Any) -> bytes:
    """A chat body."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def post(body: bytes, extra: str = "", path: str = "/v1/chat/completions", version: str = "1.1") -> bytes:
    """A whole POST; `extra`: header lines with their ends."""
    head = f"POST {path} HTTP/{version}\r\nhost: gateway\r\n{extra}content-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body
