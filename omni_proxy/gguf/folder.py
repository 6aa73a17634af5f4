"""A path that a user names -> a model folder: a GGUF file becomes one, made once and kept.

The folder holds the small files that everybody else reads, and a link to the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Final

from omni_proxy.gguf.file import GgufError, GgufFile

WEIGHTS: Final = "model.gguf"
_VERSION: Final = 1
"""Raised when what is written changes."""


def model_name(path: Path) -> str:
    """The name to serve a model under when nobody gives one."""
    file = _gguf_of(path)
    return path.resolve().name if file is None else file.stem


def model_folder(path: Path, cache: Path | None = None) -> Path:
    """`path` itself, or the folder made of the GGUF file that it is or holds. Raises GgufError."""
    file = _gguf_of(path)
    if file is None:
        return path
    file = file.resolve()
    target = (cache or _cache()) / f"{file.stem}-{_identity(file)}"
    if not target.is_dir():
        _make(file, target)
    return target


def _gguf_of(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise GgufError(f"{path}: name one of its {len(files)} GGUF files")
        return files[0] if files else None
    return None


def _cache() -> Path:
    """Under the user's home, or where temporary files go if that cannot be written."""
    home = Path.home() / ".cache" / "omni-proxy" / "gguf"
    try:
        home.mkdir(parents=True, exist_ok=True)
        return home
    except OSError:
        return Path(tempfile.gettempdir()) / f"omni-proxy-gguf-{os.getuid()}"


def _identity(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        raise GgufError(f"{file}: no such file") from None
    said = f"{_VERSION} {file} {stat.st_size} {stat.st_mtime_ns}"
    return blake2b(said.encode(), digest_size=6).hexdigest()


def _make(file: Path, target: Path) -> None:
    """Written aside and moved into place, so that several processes may do this at once."""
    from omni_proxy.gguf.config import model_config
    from omni_proxy.gguf.tokenizer import generation_config, tokenizer_config, tokenizer_json

    source = GgufFile(file)
    texts = {
        "config.json": json.dumps(model_config(source), indent=1),
        "generation_config.json": generation_config(source),
        "tokenizer.json": tokenizer_json(source),
        "tokenizer_config.json": tokenizer_config(source),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    for name, text in texts.items():
        (aside / name).write_text(text, encoding="utf-8")
    (aside / WEIGHTS).symlink_to(file)
    try:
        aside.rename(target)
    except OSError:  # somebody else was faster
        shutil.rmtree(aside)
        if not target.is_dir():
            raise
