"""The policies that a config may name. Pure; a doubled or unknown name is an error at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.scheduler.placement import FewestKvTokens, FewestPrefillTokens, FewestUncachedTokens, Placer

PREFILL_PLACERS: Final[Mapping[str, type[Placer]]] = {
    "fewest-tokens": FewestPrefillTokens,
    "fewest-uncached-tokens": FewestUncachedTokens,
}
DECODE_PLACERS: Final[Mapping[str, type[Placer]]] = {"fewest-kv-tokens": FewestKvTokens}
