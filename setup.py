"""The compiled CPU kernels as an optional extension: without a C++ compiler the package installs and uses torch."""

import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
SOURCE_DIR = Path("kernels/omni_kernels/cpu/src")
sys.path.insert(0, str(ROOT / "kernels" / "omni_kernels" / "cpu"))

import build as kernels  # noqa: E402  (kernels/omni_kernels/cpu/build.py, standard library only)

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
        )
    ]
)
