"""Names of prefixes: one 64-bit key for each full unit of a prompt, chained from its beginning. Pure.

    key[i] = XXH3(tokens of unit i, seed = key[i-1] ^ H(extra of unit i))        key[-1] = root(LoRA, salt)

A key names everything up to its unit's end, so equal keys mean equal prefixes, whatever size of block a worker has: a
worker with blocks of n units is asked for every n-th key only. Keys are equal in every process and on every machine.
They are not meant against forgers: a collision costs a wrong guess about a cache, never a wrong answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

UNIT_TOKENS: Final = 16
"""Tokens behind one key: the smallest block size in wide use, and a divisor of the larger ones."""

TOKEN_BYTES: Final = 4
_UNIT_BYTES: Final = UNIT_TOKENS * TOKEN_BYTES
_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


def root_key(lora: str = "", salt: str = "") -> int:
    """Parent of a first unit. Prompts under different adapters or salts never share a key."""
    return first_key(lora or None, (salt,) if salt else ())


def first_key(adapter: str | None, extra: Sequence[object]) -> int:
    """The same, of what an engine's event tells of a first block."""
    return extra_key(extra if adapter is None else [["adapter", adapter], *extra])


def extra_key(extra: Sequence[object]) -> int:
    """What tells two equal token sequences apart, as one number; 0 when there is nothing."""
    return xxh3_64_intdigest(_encode(list(extra))) if extra else 0


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as keys read them. Raises OverflowError or TypeError for what is no token id."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def chain(parent: int, data: bytes) -> list[int]:
    """Keys of the full units in `data` (see `token_bytes`) after the prefix of `parent`; a rest is left out."""
    keys: list[int] = []
    add, digest, key = keys.append, xxh3_64_intdigest, parent
    for start in range(0, len(data) - _UNIT_BYTES + 1, _UNIT_BYTES):
        key = digest(data[start : start + _UNIT_BYTES], key)
        add(key)
    return keys


def block_keys(token_ids: Iterable[int], lora: str = "", salt: str = "") -> tuple[int, ...]:
    """Keys of a whole prompt."""
    return tuple(chain(root_key(lora, salt), token_bytes(token_ids)))
