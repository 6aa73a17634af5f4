"""`kv_transfer_params` in the shape that vLLM's NIXL connector speaks, and SGLang's bootstrap fields. Pure.

A prefill leg asks with `do_remote_decode`, is answered with the place of its blocks, and the decode leg passes that
answer on with `do_remote_prefill`. With `bootstrap_room` both legs may run together. Parameters that cannot be
trusted are refused: a decode leg that read the wrong blocks would answer with status 200 and wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from omni_proxy.workers.engine.openai_api import ApiError, bad_value
from omni_proxy.workers.engine.types import Handoff, JoinRoom, PullFrom

_FIELD: Final = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Leg:
    """Which leg of a handoff a call is: `keep_kv` prefill, `pull` or `join` decode, none of them both in one."""

    keep_kv: bool = False
    pull: PullFrom | None = None
    room: int | None = None
    """Of a prefill leg: where the decode leg may join it."""
    join: JoinRoom | None = None

    @property
    def alone(self) -> bool:
        """Whether nothing is handed off."""
        return not self.keep_kv and self.pull is None and self.join is None


def parse_leg(params: Mapping[str, Any] | None) -> Leg:
    """The leg that `kv_transfer_params` asks for; raises `ApiError` 400 if they are contradictory or incomplete."""
    if not params:
        return Leg()
    give = _flag(params, "do_remote_decode")
    take = _flag(params, "do_remote_prefill")
    if give and take:
        both = "do_remote_decode and do_remote_prefill cannot both be true"
        raise ApiError(400, f"{_FIELD}: {both}", _FIELD)
    return Leg(keep_kv=give, pull=_pull_from(params) if take else None)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The three fields with which SGLang's legs find each other, as a body holds them."""

    host: str | None
    port: int | str | None
    room: int | str | None


def meet(leg: Leg, where: Bootstrap, role: str) -> Leg:
    """The leg with its room, if the body names one; raises `ApiError` 400 for one that cannot be.

    Both legs may come with the same body (SGLang's way): then the worker's role says which one this is. A body that
    pulls, or that asks to keep KV, has said so itself.
    """
    if where.room is None or leg.pull is not None:
        return leg
    room = _number("bootstrap_room", where.room, 0, 2**63 - 1)
    if leg.keep_kv or role == "prefill":
        return replace(leg, keep_kv=True, room=room)
    if not where.host:
        raise bad_value("bootstrap_host", where.host, "bootstrap_room needs the prefill worker's host")
    if where.port is None:
        raise bad_value("bootstrap_port", where.port, "bootstrap_room needs the prefill worker's bootstrap port")
    return replace(leg, join=JoinRoom(where.host.strip("[]"), _number("bootstrap_port", where.port, 1, 65535), room))


def _number(name: str, value: int | str, least: int, most: int) -> int:
    """A whole number, which some gateways write as text."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or not least <= number <= most:
        raise bad_value(name, value, f"expected a whole number from {least} to {most}")
    return number


def check_prompt(pull: PullFrom | None, prompt_tokens: int) -> None:
    """Refuse a decode leg whose prompt is not the one that was computed: its KV would be wrong, not absent."""
    if pull is not None and pull.num_tokens != prompt_tokens:
        rule = f"but the prompt has {prompt_tokens} tokens: these blocks belong to another prompt"
        raise bad_value(f"{_FIELD}.remote_num_tokens", pull.num_tokens, rule)


def handoff_params(handoff: Handoff, now: float) -> dict[str, Any]:
    """The prefill leg's answer. `now` is the epoch in seconds, from which the lease's end is counted."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(handoff.block_ids)],
        "remote_engine_id": handoff.engine_id,
        "remote_request_id": handoff.request_id,
        "remote_host": handoff.host,
        "remote_port": handoff.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": handoff.num_tokens,
        "remote_blocks_expiry_time": now + handoff.expires_in_s,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": handoff.cached_tokens,
    }


def _pull_from(params: Mapping[str, Any]) -> PullFrom:
    for name in ("tp_size", "dcp_size", "pp_size"):
        if params.get(name) not in (None, 1):
            raise bad_value(f"{_FIELD}.{name}", params[name], "this engine pulls from one rank only")
    if params.get("transfer_mode") not in (None, "pull"):
        rule = "this engine can only pull"
        raise bad_value(f"{_FIELD}.transfer_mode", params["transfer_mode"], rule)
    return PullFrom(
        engine_id=_text(params, "remote_engine_id"),
        request_id=_text(params, "remote_request_id"),
        host=_text(params, "remote_host"),
        port=_count(params, "remote_port", most=65535),
        block_ids=_block_ids(params.get("remote_block_ids")),
        num_tokens=_count(params, "remote_num_tokens"),
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_value(f"{_FIELD}.{name}", value, "expected true or false")
    return bool(value)


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise bad_value(f"{_FIELD}.{name}", value, "expected a non-empty string")
    return value


def _count(params: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = params.get(name)
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" up to {most}"
        raise bad_value(f"{_FIELD}.{name}", value, f"expected a positive integer{limit}")
    return value


def _block_ids(value: Any) -> tuple[int, ...]:
    """Block ids, nested per KV group as vLLM sends them (one group here) or flat as older versions do."""
    name = f"{_FIELD}.remote_block_ids"
    if not isinstance(value, list) or not value:
        raise bad_value(name, value, "expected a list with one list of block ids")
    if isinstance(value[0], list):
        if len(value) != 1:
            raise bad_value(name, value, "this engine has one KV group")
        value = value[0]
    if not value or any(type(block) is not int or block < 0 for block in value):
        raise bad_value(name, value, "expected a list of block ids")
    return tuple(value)
