"""What the access log is told of an exchange. Compiled: every request pays for it."""

from __future__ import annotations

from typing import Final

from omni_proxy.api.exchange import Exchange
from omni_proxy.observe.log_lines import Ending

_LEFT: Final = 499
"""The status, as nginx has it, of a request whose client left before it was told one."""


def ending_of(exchange: Exchange, error: str | None) -> Ending:
    """How an exchange ended; `error`: a code, where it went wrong."""
    return Ending(
        exchange.request_id.decode(),
        exchange.peer,
        "POST",
        exchange.path.decode("ascii", "replace"),
        exchange.status or _LEFT,
        exchange.bytes_out,
        exchange.user_agent,
        None if error is None else str(error),
    )
