"""The compiled library through ctypes: found or built once, its structures and signatures declared.

Knows the C interface (`src/omni_cpu.h`), not tensors.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

from omni_kernels.cpu import build

_LOG = logging.getLogger("omni_kernels")

STATUS: Final = {
    1: "out of memory",
    2: "ids must be in -1..E-1",
    3: "tokens must be in the vocabulary",
    4: "slots must lie in the cache",
    5: "block_tables must name blocks of the cache, enough for the keys",
    6: "rows or positions out of range",
}
"""What a status of the C interface says about the arguments."""


class Matrix(Structure):
    """A packed matrix [n, k]."""

    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("dtype", c_int32),
        ("gated", c_int32),
    ]


class Routing(Structure):
    """How experts are chosen."""

    _fields_ = [
        ("experts", c_int64),
        ("top_k", c_int64),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("sigmoid", c_int32),
        ("renormalise", c_int32),
        ("per_group", c_int32),
        ("scale", c_float),
        ("bias", c_void_p),
        ("group_best", c_int32),
    ]


class Experts(Structure):
    """The weights of one MLP layer."""

    _fields_ = [
        ("w13", Matrix),
        ("w2", Matrix),
        ("shared13", Matrix),
        ("shared2", Matrix),
        ("experts", c_int64),
    ]


class Ragged(Structure):
    """Sequences of a batch."""

    _fields_ = [
        ("sequences", c_int64),
        ("query_start", c_void_p),
        ("kv_lens", c_void_p),
        ("tables", c_void_p),
        ("table_start", c_void_p),
    ]


class Cache(Structure):
    """One layer of a paged cache."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("blocks", c_int64),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("dtype", c_int32),
    ]


class Layer(Structure):
    """The weights of one decoder layer."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("out_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate", Matrix),
        ("mlp", Experts),
        ("routing", Routing),
    ]


class Model(Structure):
    """The weights of a decoder."""

    _fields_ = [
        ("layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("vocab", c_int64),
        ("table_len", c_int64),
        ("eps", c_float),
        ("clip", c_float),
        ("norm_rows", c_int32),
        ("embedding_dtype", c_int32),
        ("embedding", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    ]


class StepArgs(Structure):
    """One step's rows."""

    _fields_ = [
        ("rows", c_int64),
        ("logit_rows", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logit_row", c_void_p),
        ("ragged", Ragged),
        ("cache", Cache),
        ("layer_stride", c_int64),
        ("expert_tokens", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("progress", c_void_p),
        ("progress_fd", c_int32),
    ]


class Draws(Structure):
    """How the next token of each row is drawn."""

    _fields_ = [
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("uniform", c_void_p),
    ]


class Policy(Structure):
    """How drafts are made."""

    _fields_ = [
        ("gram", c_int64),
        ("longest", c_int64),
        ("first_pause", c_int64),
        ("longest_pause", c_int64),
        ("learn", c_double),
        ("share", c_double),
    ]


class Said(Structure):
    """What a sequence has said, and how its drafts have fared."""

    _fields_ = [
        ("text", c_void_p),
        ("length", c_int64),
        ("most", c_int64),
        ("pause", c_int64),
        ("resumes_at", c_int64),
        ("rate", c_double),
    ]


class Drafts(Structure):
    """Drafts of a burst."""

    _fields_ = [
        ("policy", Policy),
        ("said", POINTER(Said)),
        ("rows", c_int64),
        ("limit_s", c_double),
    ]


class Ends(Structure):
    """Tokens that end a sequence."""

    _fields_ = [("tokens", c_void_p), ("start", c_void_p)]


class Told(Structure):
    """What a burst tells."""

    _fields_ = [
        ("width", c_int64),
        ("tokens", c_void_p),
        ("counts", c_void_p),
        ("fared", c_void_p),
        ("steps", c_int64),
        ("plain_steps", c_int64),
        ("plain_s", c_double),
        ("drafted_s", c_double),
    ]


_P, _I, _N, _F = c_void_p, c_int32, c_int64, c_float
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "omni_version": (_I, []),
    "omni_source_hash": (c_char_p, []),
    "omni_isa_count": (_I, []),
    "omni_isa_name": (c_char_p, [_I]),
    "omni_isa_usable": (_I, [_I]),
    "omni_isa_current": (_I, []),
    "omni_isa_select": (_I, [_I]),
    "omni_use_amx": (_I, [_I]),
    "omni_use_pairs": (_I, [_I]),
    "omni_vnni": (_I, []),
    "omni_use_vnni": (_I, [_I]),
    "omni_large_pages": (None, [_P, _N]),
    "omni_packed_bytes": (_N, [_N, _N, _I, _I]),
    "omni_pack": (None, [_P, _N, _N, _I, _I, _P]),
    "omni_linear": (_I, [_P, _I, _N, POINTER(Matrix), _P, _I, _I]),
    "omni_route": (_I, [_P, _N, POINTER(Routing), _P, _P, _P, _I]),
    "omni_fused_moe": (_I, [_P, _I, _N, POINTER(Experts), _P, _P, _N, _P, _I]),
    "omni_rms_norm": (_I, [_P, _P, _P, _N, _N, _N, _F, _I, _P, _P, _I]),
    "omni_rope": (_I, [_P, _P, _P, _N, _N, _N, _N, _I, _P, _I]),
    "omni_silu_and_mul": (_I, [_P, _N, _N, _I, _P, _I]),
    "omni_attention": (_I, [_P, _I, _N, _N, POINTER(Ragged), POINTER(Cache), _F, _P, _I]),
    "omni_kv_write": (_I, [POINTER(Cache), _P, _N, _P, _P, _N, _N]),
    "omni_kv_copy": (_I, [_P, _N, _N, _N, _P, _N, _P, _I]),
    "omni_sample": (_I, [_P, _N, _N, _P, _P, _P, _P, _P]),
    "omni_step": (_I, [POINTER(Model), POINTER(StepArgs), _I]),
    "omni_burst": (
        _I,
        [POINTER(Model), POINTER(StepArgs), POINTER(Draws), POINTER(Drafts), POINTER(Ends), _N, POINTER(Told), _I],
    ),
    "omni_draft": (_N, [POINTER(Policy), POINTER(Said), _N, _P]),
    "omni_drafted": (None, [POINTER(Policy), POINTER(Said), _N, _N]),
    "omni_bench_read": (c_double, [_P, _N, _I]),
    "omni_bench_fma": (c_double, [_N, _I]),
    "omni_bench_pairs": (c_double, [_N, _I]),
    "omni_bench_quads": (c_double, [_N, _I]),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions. Raises OSError, or AttributeError if it is another version's."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _packaged() -> ctypes.CDLL | None:
    """The library that the package's build made, if it is of these sources."""
    for path in sorted(Path(__file__).parent.glob("_omni_cpu*.so")):
        try:
            library = open_library(path)
        except (OSError, AttributeError):
            continue
        if library.omni_source_hash().decode() == build.source_hash():
            return library
    return None


def find_library() -> tuple[ctypes.CDLL | None, str]:
    """The library and, if there is none, why. Compiles on first use; says in the log when it falls back."""
    library = _packaged()
    if library is not None:
        return library, ""
    try:
        return open_library(build.cached_library()), ""
    except (build.BuildError, OSError, AttributeError) as exc:
        reason = " ".join(str(exc).split())
        _LOG.warning("no compiled CPU kernels, falling back to torch: %s", reason)
        return None, reason


def check(status: int, op: str) -> None:
    """Raise what a status means: ValueError naming the argument, or MemoryError."""
    if status == 0:
        return
    text = f"{op}: {STATUS.get(status, f'status {status}')}"
    raise MemoryError(text) if status == 1 else ValueError(text)
