"""Omni Proxy's config for a run: the one place that knows its shape."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

# The peers have no such limits, so ours must not hold back what theirs let through.
_MAX_SEQS: Final = 4096
_MAX_BATCH_TOKENS: Final = 16_000_000


def omni_config(
    port: int,
    prefill: Sequence[int],
    decode: Sequence[int],
    access_log: Path,
    *,
    processes: int = 1,
) -> str:
    """YAML of a gateway over NIXL workers: prefix matching off, access log on, no limits."""
    limits = f"max_seqs: {_MAX_SEQS}, max_batch_tokens: {_MAX_BATCH_TOKENS}"
    lines = [
        f"listen: {{host: 127.0.0.1, port: {port}}}",
        "schedule_mode: sequential",
        "kv_cache_policy: independent",
        f"processes: {processes}",
        f'access_log: {{path: "{access_log}"}}',
        "workers:",
    ]
    for role, letter, ports in (("prefill", "p", prefill), ("decode", "d", decode)):
        lines += [
            f'  - {{name: {letter}{i}, url: "http://127.0.0.1:{at}", role: {role}, connector: vllm-nixl, {limits}}}'
            for i, at in enumerate(ports)
        ]
    return "\n".join(lines) + "\n"
