"""KV events as engines write them, in three encodings, read into one form. Pure.

    A  batch and events are arrays, tag first                    (older vLLM, SGLang)
    B  the batch is an array, events are maps with `type`        (vLLM since spring 2026)
    C  both are maps                                             (newest vLLM)

Fields at an array's end may be missing, fields that are not known may follow. An event that makes no sense is counted
and left out; a batch that makes none is `WireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_proxy.apc.index import Tier
from omni_proxy.apc.keys import token_bytes

MAX_PAYLOAD_BYTES: Final = 64 << 20
_CLEARED: Final = b"AllBlocksCleared"
_LOW_64: Final = (1 << 64) - 1

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_FULL_ATTENTION: Final = (None, "full_attention", "mla_attention", "mla")


class WireError(ValueError):
    """A payload that is no batch of KV events."""


class Stored(msgspec.Struct, frozen=True):
    """Blocks that follow one another after `parent`; hashes are the engine's own names."""

    hashes: tuple[int, ...]
    parent: int | None
    block_tokens: int
    tokens: bytes
    """As `keys.token_bytes` writes them."""
    adapter: str | None
    extras: tuple[tuple[object, ...], ...]
    """For each block what it depends on besides tokens and adapter; empty where no block depends on anything."""
    tier: Tier


class Removed(msgspec.Struct, frozen=True):
    """Blocks that left a tier."""

    hashes: tuple[int, ...]
    tier: Tier


class Cleared(msgspec.Struct, frozen=True):
    """The whole cache was emptied."""


class Batch(msgspec.Struct, frozen=True):
    """What one message told. `malformed` events were left out, and so were `ignored` ones of no use to us."""

    events: tuple[Stored | Removed | Cleared, ...]
    malformed: int
    ignored: int
    sent_at: float | None = None
    """By the publisher's wall clock."""


def read_batch(payload: bytes) -> Batch:
    """Read one message. Raises WireError."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"{len(payload)} bytes are more than a batch may have")
    try:
        body = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"no msgpack: {exc}") from exc
    listed = body.get("events") if isinstance(body, dict) else body[1] if _is_batch(body) else None
    if not isinstance(listed, list):
        raise WireError("no list of events")
    events: list[Stored | Removed | Cleared] = []
    malformed = ignored = 0
    for raw in listed:
        try:
            event = _read_event(raw)
        except (TypeError, ValueError, OverflowError, AttributeError, LookupError):
            malformed += 1
            continue
        if event is None:
            ignored += 1
        else:
            events.append(event)
    sent = body.get("ts") if isinstance(body, dict) else body[0]
    sent_at = float(sent) if isinstance(sent, float) and 0.0 < sent < 2**53 else None
    return Batch(tuple(events), malformed, ignored, sent_at)


def clears(payload: bytes) -> bool:
    """Does a message tell that the whole cache was emptied? Quick where it does not."""
    if _CLEARED not in payload:
        return False
    try:
        return any(isinstance(event, Cleared) for event in read_batch(payload).events)
    except WireError:
        return False


def _is_batch(body: object) -> bool:
    return isinstance(body, list) and len(body) >= 2


def _read_event(raw: Any) -> Stored | Removed | Cleared | None:
    """One event; None for a kind that is of no use here."""
    kind, fields = _named(raw)
    if fields.get("kv_cache_spec_kind") not in _FULL_ATTENTION or fields.get("group_idx") not in (None, 0):
        return None
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return Removed(_hashes(fields["block_hashes"]), tier_of(fields.get("medium")))
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return None


def _named(raw: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, dict):
        return str(raw["type"]), raw
    kind = str(raw[0])
    return kind, dict(zip(_FIELDS.get(kind, ()), raw[1:], strict=False))


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes = _hashes(fields["block_hashes"])
    parent, block_tokens = fields.get("parent_block_hash"), fields["block_size"]
    if not isinstance(block_tokens, int) or block_tokens < 1 or len(fields["token_ids"]) != len(hashes) * block_tokens:
        raise ValueError("tokens and blocks do not fit together")
    adapter = _adapter(fields)
    return Stored(
        hashes,
        None if parent is None else _hash(parent),
        block_tokens,
        token_bytes(fields["token_ids"]),
        adapter,
        _extras(fields, adapter, len(hashes)),
        tier_of(fields.get("medium")),
    )


def _adapter(fields: Mapping[str, Any]) -> str | None:
    """The adapter's name. One that is known by number only gets a name that no request can have."""
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if name is not None:
        return str(name)
    return None if number is None else f"\0{number}"


def _extras(fields: Mapping[str, Any], adapter: str | None, blocks: int) -> tuple[tuple[object, ...], ...]:
    """What each block depends on, in the engine's order; engines that list the adapter too are understood."""
    lists: Sequence[Any] | None = fields.get("extra_keys")
    if not lists or not any(lists):
        return ()
    if len(lists) != blocks:
        raise ValueError("extra keys and blocks do not fit together")
    named = (adapter, fields.get("lora_id")) if adapter is not None else ()
    return tuple(tuple(extra for extra in listed or () if extra not in named) for listed in lists)


def _hashes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError("block hashes must be a list")
    return tuple(map(_hash, values))


def _hash(value: object) -> int:
    """An engine's hash as a number; of long digests the last 64 bits, as vLLM writes them as numbers."""
    if isinstance(value, int):
        return value & _LOW_64
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    raise TypeError("a hash must be a number or bytes")


def tier_of(medium: object) -> Tier:
    """The tier that an engine's word for a place means."""
    if medium is None:
        return Tier.DEVICE
    name = str(medium).upper()
    if name.startswith(("GPU", "NPU", "DEVICE", "HBM")):
        return Tier.DEVICE
    return Tier.CPU if name.startswith(("CPU", "HOST", "DRAM")) else Tier.DISK
