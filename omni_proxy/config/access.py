"""Who may ask for what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from omni_proxy.access.keys import read_hash
from omni_proxy.config.section import Section


def _key_hash(text: str) -> str:
    read_hash(text)
    return text


KeyHash = Annotated[str, AfterValidator(_key_hash)]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class Tenant(Section):
    """Who asks, by the keys that he may show. Limits hold for all of them and all front processes together."""

    keys: Annotated[tuple[KeyHash, ...], Field(min_length=1)]
    """Hashes as `omni-proxy key` prints them."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Of prompts and answers."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Requests that run at once."""


def _route(path: str) -> str:
    if not path.startswith("/") or "*" in path.removesuffix("/*") or "?" in path:
        raise ValueError("must be a path, or a path with /* at its end")
    return path


Route = Annotated[str, AfterValidator(_route)]


class Access(Section):
    """Who may ask for what on the clients' port (docs/security.md)."""

    tenants: dict[TenantName, Tenant] = {}
    """By name; where there are any, requests need a key of one of them."""
    tenants_file: Path | None = None
    """YAML with further `tenants:`, read with the config."""
    routes: tuple[Route, ...] | None = None
    """All that is served; null: every route that the gateway knows."""
    open_routes: tuple[Route, ...] = ("/health", "/ready")
    """Need no key."""

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.tenants) or self.tenants_file is not None

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Self:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                other = owners.setdefault(key, name)
                if other != name:
                    raise ValueError(f"tenants {other} and {name} have the same key")
        return self
