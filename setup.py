"""What is compiled when the package is built; all of it is optional.

The CPU kernels are C++: without a compiler the engine uses torch. The scheduler and the relay are ordinary typed Python
that mypyc turns into C: without it, in editable installs, and with OMNI_PURE=1 the same files run as they are, at
about half the speed. The pump is C, for Linux, also in editable installs: without it Python moves all of a stream.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
SOURCE_DIR = Path("kernels/omni_kernels/cpu/src")
sys.path.insert(0, str(ROOT / "kernels" / "omni_kernels" / "cpu"))

import build as kernels  # noqa: E402  (kernels/omni_kernels/cpu/build.py, standard library only)

COMPILED = (
    "omni_proxy/access/gate.py",
    "omni_proxy/call.py",
    "omni_proxy/calls.py",
    "omni_proxy/core.py",
    "omni_proxy/flow/*.py",
    "omni_proxy/driver.py",
    "omni_proxy/json_fields.py",
    "omni_proxy/lifecycle/*.py",
    "omni_proxy/messages/packed.py",
    "omni_proxy/messages/records.py",
    "omni_proxy/messages/usual.py",
    "omni_proxy/scheduler/*.py",
    "omni_proxy/observe/access_log.py",
    "omni_proxy/observe/edge_counts.py",
    "omni_proxy/observe/log_lines.py",
    "omni_proxy/observe/tallies.py",
    "omni_proxy/observe/timelines.py",
    "omni_proxy/processes/link.py",
    "omni_proxy/ui/watched.py",
    "omni_proxy/workers/answer.py",
    "omni_proxy/workers/connectors/answers.py",
    "omni_proxy/workers/connectors/fields.py",
    "omni_proxy/workers/connectors/pair.py",
    "omni_proxy/workers/head.py",
    "omni_proxy/workers/http.py",
    "omni_proxy/workers/upstream.py",
    "omni_proxy/api/bodies.py",
    "omni_proxy/api/bounds.py",
    "omni_proxy/api/client.py",
    "omni_proxy/api/decode_leg.py",
    "omni_proxy/api/edge.py",
    "omni_proxy/api/ended.py",
    "omni_proxy/api/events.py",
    "omni_proxy/api/exchange.py",
    "omni_proxy/api/family.py",
    "omni_proxy/api/hot.py",
    "omni_proxy/api/http_out.py",
    "omni_proxy/api/intake.py",
    "omni_proxy/api/legs.py",
    "omni_proxy/api/resumable.py",
    "omni_proxy/api/resume_scan.py",
    "omni_proxy/api/resumption.py",
    "omni_proxy/api/said.py",
    "omni_proxy/api/served.py",
    "omni_proxy/api/sse.py",
    "omni_proxy/api/starting.py",
    "omni_proxy/api/timing.py",
    "omni_proxy/api/trace_context.py",
    "omni_proxy/api/whole.py",
)
"""The hot path. Structs, pydantic models and subclasses of foreign classes do not compile to what they say: they live
elsewhere."""

NOTHING_IS_COMPILED_FOR = frozenset({"editable_wheel", "develop", "sdist", "egg_info", "dist_info"})
"""Editable installs run the files as they are; the others only ask for names, and mypyc takes minutes."""


def compiled_modules() -> list[Extension]:
    """The hot path as C extensions, or nothing where it cannot or should not be compiled."""
    if os.environ.get("OMNI_PURE") == "1" or NOTHING_IS_COMPILED_FOR & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []
    os.chdir(ROOT)
    paths = sorted(str(path) for pattern in COMPILED for path in Path().glob(pattern))
    options = ["--config-file=", "--ignore-missing-imports", "--python-version=3.11"]
    try:
        modules: list[Extension] = mypycify([*options, *paths], opt_level="2", debug_level="0")
    except SystemExit:
        print("omni-proxy: mypyc found faults; the package is built without compiled modules", file=sys.stderr)
        return []
    for module in modules:
        module.optional = True
        if sys.platform != "win32":
            # Nobody else's functions stand in for these: they may call one another directly, and be inlined.
            module.extra_compile_args.append("-fvisibility=hidden")
    return modules


def pump() -> list[Extension]:
    """What moves streams without Python; only Linux has epoll."""
    if os.environ.get("OMNI_PURE") == "1" or sys.platform != "linux":
        return []
    headers = ["omni_proxy/relay/pump_chunks.h", "omni_proxy/relay/pump_moves.h"]
    sources = ["omni_proxy/relay/pump.c"]
    return [Extension("omni_proxy.relay._pump", sources=sources, depends=headers, libraries=["pthread"], optional=True)]


def body_scan() -> list[Extension]:
    """What reads large bodies in one pass; without it msgspec does, at a sixth of the speed."""
    if os.environ.get("OMNI_PURE") == "1":
        return []
    headers = [f"omni_proxy/{name}.h" for name in ("body_leg", "body_names", "body_pick", "json_scan")]
    extension = Extension("omni_proxy._body_scan", sources=["omni_proxy/body_scan.c"], depends=headers, optional=True)
    extension.extra_compile_args = ["-O3"]
    return [extension]


setup(
    ext_modules=[
        Extension(
            "omni_kernels.cpu._omni_cpu",
            sources=[str(SOURCE_DIR / path.name) for path in kernels.sources()],
            depends=[str(SOURCE_DIR / path.name) for path in sorted((ROOT / SOURCE_DIR).glob("*.h"))],
            define_macros=[("OMNI_SOURCE_HASH", f'"{kernels.source_hash()}"')],
            extra_compile_args=[*kernels.FLAGS],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        ),
        *pump(),
        *body_scan(),
        *compiled_modules(),
    ]
)
