"""A member as it travels: from the scheduler to whoever sends requests."""

from __future__ import annotations

from msgspec import Struct

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
