"""API keys: how they are made, and what of them is kept.

A key holds 256 random bits, so that nobody can try them all: a plain SHA-256 of it is as safe as a slow hash, and fast
enough for every request. Passwords that people think of are no keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

PREFIX: Final = "omni-"
SCHEME: Final = "sha256:"
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")


def make_key() -> str:
    """A new key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What stands in a config for a key."""
    return SCHEME + digest(key.encode()).hex()


def digest(key: bytes) -> bytes:
    """32 bytes by which a key is known."""
    return hashlib.sha256(key).digest()


def read_hash(text: str) -> bytes:
    """The digest that a config names. Raises ValueError, without repeating what may be a key."""
    if _HASH.fullmatch(text) is None:
        raise ValueError("must be sha256: and 64 hexadecimal digits, as `omni-proxy key` prints it")
    return bytes.fromhex(text.removeprefix(SCHEME))
