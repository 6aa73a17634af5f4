"""What an engine says of itself, read from the answers of its own routes. Knows no sockets and decides nothing.

Engines say different things on different routes, and may say anything: what is not understood is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from omni_proxy.messages import Role

CONNECTOR_OF: Final[Mapping[str, str]] = {
    "NixlConnector": "vllm-nixl",
    "MooncakeConnector": "vllm-mooncake",
    "P2pNcclConnector": "vllm-p2p-nccl",
    "LMCacheConnectorV1": "lmcache",
    "LMCacheMPConnector": "lmcache",
    "SharedStorageConnector": "lmcache",
    "ExampleConnector": "lmcache",
    "MooncakeConnectorV1": "ascend-mooncake",
    "MooncakeHybridConnector": "ascend-mooncake",
    "MooncakeLayerwiseConnector": "ascend-layerwise",
    "AscendHcclConnectorV1": "omni-llmdatadist",
}
"""By the name that vLLM and its relatives have for a KV connector."""
_KV_CONNECTOR: Final = re.compile(r"kv_connector['\"]?\s*[=:]\s*['\"](\w+)['\"]")
_KV_ROLE: Final = re.compile(r"kv_role['\"]?\s*[=:]\s*['\"](\w+)['\"]")
_TENSOR_PARALLEL: Final = re.compile(r"tensor_parallel_size['\"]?\s*[=:]\s*(\d+)")
_DTYPE: Final = re.compile(r"\bdtype['\"]?\s*[=:]\s*['\"]?(?:torch\.)?(\w+)")
_CACHE_INFO: Final = re.compile(r"\nvllm:cache_config_info\{([^}]*)\}")
"""No `^`: a megabyte of other metrics is passed over by its fixed beginning, and not looked at line by line."""
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_ROLE_OF: Final = {
    "kv_producer": Role.PREFILL,
    "kv_consumer": Role.DECODE,
    "kv_both": Role.MIXED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
_VAGUE: Final = frozenset({"auto", "", "None", "none"})
_OWNERS: Final = {"vllm": "vllm", "sglang": "sglang", "omni-proxy": "omni", "llamacpp": "llama.cpp"}


class Facts(Struct, frozen=True):
    """What is known of an engine. Empty or None: it did not say."""

    engine: str = ""
    """vllm, sglang, omni (the embedded one), llama.cpp, tgi."""
    version: str = ""
    connector: str = ""
    """Which of ours speaks to it."""
    role: Role | None = None
    """What it was started for; None where it does both, or did not say."""
    model: str = ""
    """Where its weights come from: a repository or a folder."""
    dtype: str = ""
    """Of what it hands over: of the KV cache where that is told, else of the model."""
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    """Of each data-parallel rank."""
    max_model_len: int | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    bootstrap_port: int | None = None
    engine_ids: Mapping[int, str] = {}
    """By data-parallel rank: how its KV connector calls itself."""
    counts_experts: bool = False
    """Its metrics tell how its experts are loaded."""


def of_models(models: Sequence[Mapping[str, object]]) -> Facts:
    """From the entries of `/v1/models`: who owns the first says what serves it."""
    first = models[0] if models else {}
    engine = _OWNERS.get(str(first.get("owned_by")), "")
    root = first.get("root")
    model = root if isinstance(root, str) and engine == "vllm" and root != first.get("id") else ""
    return Facts(engine=engine, model=model, connector="omni" if engine == "omni" else "")


def of_metrics(text: str) -> Facts:
    """From `/metrics` in vLLM's words: block size, capacity, ranks; and a KV connector shows by metrics of its own."""
    text = "\n" + text
    infos = [dict(_LABEL.findall(found)) for found in _CACHE_INFO.findall(text)]
    first = infos[0] if infos else {}
    block, blocks = _count(first.get("block_size")), _count(first.get("num_gpu_blocks"))
    dtype = first.get("cache_dtype", "")
    nixl = "\nvllm:nixl_" in text
    return Facts(
        connector="vllm-nixl" if nixl else "",
        dtype="" if dtype in _VAGUE else dtype,
        block_tokens=block,
        kv_capacity_tokens=None if block is None or blocks is None else block * blocks,
        dp_size=len({info.get("engine") for info in infos}) or None,
    )


def of_vllm_server_info(body: bytes) -> Facts:
    """From vLLM's `/server_info` (development mode): its whole config, as JSON or as Python prints it."""
    text = body.decode("utf-8", "replace").replace('\\"', '"')
    if "vllm_config" not in text:
        return Facts()
    named, role, tp = _KV_CONNECTOR.search(text), _KV_ROLE.search(text), _TENSOR_PARALLEL.search(text)
    dtype = _DTYPE.search(text)
    asked = _ROLE_OF.get(role[1]) if role else None
    return Facts(
        engine="vllm",
        connector=CONNECTOR_OF.get(named[1], "") if named else "",
        role=None if asked is Role.MIXED else asked,
        dtype="" if dtype is None or dtype[1] in _VAGUE else dtype[1],
        tp_size=_count(tp[1]) if tp else None,
    )


def of_sglang_server_info(body: bytes) -> Facts | None:
    """From SGLang's `/get_server_info`: its arguments; None where they are not SGLang's."""
    said = _object(body)
    mode = said.get("disaggregation_mode")
    if mode is None and "page_size" not in said and "mem_fraction_static" not in said:
        return None
    splits = mode in ("prefill", "decode")
    kv_dtype = str(said.get("kv_cache_dtype", ""))
    dtype = str(said.get("dtype", "")) if kv_dtype in _VAGUE else kv_dtype
    return Facts(
        engine="sglang",
        version=str(said.get("version", "")),
        connector="sglang" if splits else "aggregated",
        role=_ROLE_OF[mode] if splits and isinstance(mode, str) else None,
        model=str(said.get("model_path", "")),
        dtype="" if dtype in _VAGUE else dtype,
        block_tokens=_count(said.get("page_size")),
        kv_capacity_tokens=_count(said.get("max_total_num_tokens")),
        max_model_len=_count(said.get("context_length")),
        tp_size=_count(said.get("tp_size")),
        dp_size=_count(said.get("dp_size")),
        bootstrap_port=_count(said.get("disaggregation_bootstrap_port")) if mode == "prefill" else None,
    )


def of_version(body: bytes) -> Facts:
    """From `/version`: vLLM's answer is `{"version": …}` and nothing else."""
    said = _object(body)
    version = said.get("version")
    return Facts(version=version) if isinstance(version, str) else Facts()


def of_other(path: str, body: bytes) -> Facts:
    """From the routes by which other servers are known: `/props` (llama.cpp), `/info` (TGI)."""
    said = _object(body)
    if path == "/props" and "default_generation_settings" in said:
        return Facts(engine="llama.cpp", version=str(said.get("build_info", "")), connector="aggregated")
    if path == "/info" and ("docker_label" in said or "max_concurrent_requests" in said):
        longest = _count(said.get("max_total_tokens"))
        model, version = str(said.get("model_id", "")), str(said.get("version", ""))
        return Facts(engine="tgi", version=version, connector="aggregated", model=model, max_model_len=longest)
    return Facts()


def of_bootstrap(body: bytes) -> Mapping[int, str]:
    """From the bootstrap server of vLLM's Mooncake connector (`/query`): engine ids by data-parallel rank.

    Newer ones answer `{rank: {"engine_id": …}}`, older ones `{engine_id: {rank: …}}`.
    """
    ids: dict[int, str] = {}
    for key, value in _object(body).items():
        if not isinstance(value, dict):
            continue
        named = value.get("engine_id")
        if isinstance(named, str) and key.isdigit():
            ids[int(key)] = named
        elif named is None:
            ids.update({int(rank): key for rank in value if rank.isdigit()})
    return ids


def joined(*parts: Facts) -> Facts:
    """What several answers say together; the first that says something counts."""
    merged: dict[str, Any] = {}
    for name in Facts.__struct_fields__:
        values = (getattr(part, name) for part in parts)
        merged[name] = next((value for value in values if value not in ("", None, {})), getattr(Facts(), name))
    return Facts(**merged)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _count(value: object) -> int | None:
    """A positive number, also one that is written as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else None
