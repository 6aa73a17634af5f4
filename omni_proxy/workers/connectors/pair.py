"""The two workers of a request, as its bodies name them. Compiled: every leg makes one."""

from __future__ import annotations

from typing import Final


class Peer:
    """A worker of a request, as far as a body has to name it."""

    __slots__ = ("bootstrap_port", "dp_size", "engine_id", "host", "kv_address", "name", "port", "rank")

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        bootstrap_port: int | None = None,
        rank: int | None = None,
        dp_size: int = 1,
        kv_address: str = "",
        engine_id: str = "",
    ) -> None:
        self.name: Final = name
        self.host: Final = host
        self.port: Final = port
        self.bootstrap_port: Final = bootstrap_port
        self.rank: Final = rank
        """Of the data-parallel rank that is meant; None where the endpoint is one engine."""
        self.dp_size: Final = dp_size
        """Data-parallel ranks behind the endpoint."""
        self.kv_address: Final = kv_address
        """HOST:PORT at which its KV connector listens, where bodies or ids have to name that."""
        self.engine_id: Final = engine_id
        """By which its KV connector calls itself, where others have to know that."""


class Pair:
    """One attempt of a request: the workers that are known by now, and what they share."""

    __slots__ = ("callback_url", "decode", "prefill", "request_id", "room", "together")

    def __init__(
        self,
        request_id: bytes,
        room: int,
        prefill: Peer | None = None,
        decode: Peer | None = None,
        together: bool = False,
        callback_url: str = "",
    ) -> None:
        self.request_id: Final = request_id
        """The client's, or ours; not unique."""
        self.room: Final = room
        """A random number of 63 bits that both legs of an attempt share."""
        self.prefill: Final = prefill
        """None: D does both."""
        self.decode: Final = decode
        """None: not chosen yet."""
        self.together: Final = together
        """Both were chosen together (parallel mode)."""
        self.callback_url: Final = callback_url
        """Where D may ask for its prefill."""

    @property
    def unique_id(self) -> bytes:
        """A request id that no other attempt has and no client can know: for protocols in which it is a key to KV."""
        return b"%b-%016x" % (self.request_id, self.room)
