"""Omni Proxy's config for a run: the one place that knows its shape."""

from collections.abc import Sequence


def omni_config(
    port: int, prefill: Sequence[int], decode: Sequence[int], *, processes: int = 1
) -> str:
    """YAML of a gateway over NIXL workers; prefix matching is off, all else is as by default."""
    lines = [
        f"listen: {{host: 127.0.0.1, port: {port}}}",
        "schedule_mode: sequential",
        "kv_cache_policy: independent",
        f"processes: {processes}",
        "workers:",
    ]
    for role, letter, ports in (("prefill", "p", prefill), ("decode", "d", decode)):
        lines += [
            f'  - {{name: {letter}{i}, url: "http://127.0.0.1:{at}", role: {role}, '
            "connector: vllm-nixl}"
            for i, at in enumerate(ports)
        ]
    return "\n".join(lines) + "\n"
