"""A member as it travels: from the scheduler to whoever sends requests."""

from __future__ import annotations

from msgspec import Struct

from omni_proxy.messages import Role
from omni_proxy.tls import ClientFiles


class Member(Struct, frozen=True):
    """A worker as those who send requests need it: where it is and how to talk to it."""

    name: str
    url: str
    connector: str
    api_key: str | None = None
    bootstrap_port: int | None = None
    tls: ClientFiles | None = None
    """Set for an https URL and for no other."""
    rank: int | None = None
    """Of a data-parallel rank behind the URL; None where the endpoint is one engine."""
    dp_size: int = 1
    kv_address: str = ""
    models: tuple[str, ...] = ()
    """The models that it serves, as far as that is known."""
    model_names: tuple[tuple[str, str], ...] = ()
    """Models that it knows by other names than the gateway: ours, its own."""
    role: Role = Role.MIXED
    up: bool = True
    """Does it answer, and may it be used? Kept for encode workers, whom no scheduler chooses, and for mixed ones."""
    engine_id: str = ""
    """By which its KV connector calls itself, where it said so."""

    def way(self) -> tuple[object, ...]:
        """What makes it another worker, or another way to it."""
        return (
            self.url,
            self.connector,
            self.api_key,
            self.bootstrap_port,
            self.tls,
            self.rank,
            self.dp_size,
            self.kv_address,
            self.engine_id,
        )
