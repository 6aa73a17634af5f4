"""How a pretending D gets its KV: it asks P, waits as long as the bytes would take, and tells P."""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.sim.http.client import ClientFault, HttpPool

ROOM_PATH: Final = "/omni/room/"
RELEASE_PATH: Final = "/omni/release"


class KvGone(Exception):
    """P does not hold the KV (any more), or cannot be reached; the text says which."""


class _Released(msgspec.Struct):
    released: bool = True


class Peers:
    """Connections to other pretending workers, kept by address."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], HttpPool] = {}

    async def await_room(self, host: str, port: int, room: int) -> str:
        """Wait until P has computed the prompt of a room; the name under which it holds the KV."""
        status, body = await self._fetch(host, port, "GET", f"{ROOM_PATH}{room}")
        if status != 200:
            raise KvGone(f"the prefill worker does not know room {room}")
        return msgspec.json.decode(body, type=str)

    async def release(self, host: str, port: int, name: str) -> None:
        """Tell P that its KV has been read. Raises KvGone where P held none: what was read is worth nothing."""
        body = msgspec.json.encode({"request_id": name})
        status, answer = await self._fetch(host, port, "POST", RELEASE_PATH, body)
        if status != 200 or not msgspec.json.decode(answer, type=_Released).released:
            raise KvGone("the prefill worker does not hold the KV any more")

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    async def _fetch(self, host: str, port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        pool = self._pools.get((host, port))
        if pool is None:
            shown = f"[{host}]" if ":" in host else host
            pool = self._pools[host, port] = HttpPool(f"http://{shown}:{port}")
        try:
            return await pool.fetch(method, path, body)
        except ClientFault as exc:
            raise KvGone(f"the prefill worker cannot be reached ({exc})") from exc
