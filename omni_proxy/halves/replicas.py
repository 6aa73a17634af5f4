"""The way to the other gateways before the same workers."""

from __future__ import annotations

import re
import secrets
import socket
import time
from typing import TYPE_CHECKING

from omni_proxy.config import Config, ConfigError
from omni_proxy.driver import Watcher

if TYPE_CHECKING:
    from omni_proxy.halves.scheduling import Scheduling
    from omni_proxy.replicas.link import Link


def replica_name(config: Config) -> str:
    """Empty where this gateway is the only one."""
    if config.replicas is None:
        return ""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return config.replicas.name or f"{host}-{secrets.token_hex(3)}"


def replica_link(config: Config, name: str, scheduling: Scheduling, watchers: list[Watcher]) -> Link | None:
    """The way to the other gateways, where there are any. Raises ConfigError."""
    wanted = config.replicas
    if wanted is None:
        return None
    try:
        from omni_proxy.replicas.account import Account
        from omni_proxy.replicas.link import Link
    except ImportError as exc:
        raise ConfigError(f"replicas: needs the extra [redis]: pip install 'omni-proxy[redis]' ({exc})") from exc
    account = Account(name, scheduling.core, lambda: link.changed())
    link = Link(
        wanted.redis,
        wanted.group,
        name,
        wanted.report_s,
        wanted.lease_s,
        time.monotonic,
        account.report,
        scheduling.post,
        scheduling.ordered,
    )
    watchers.append(account)
    return link
