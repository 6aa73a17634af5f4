"""The model's tokenizer file, loaded without `transformers`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class TokenizerError(Exception):
    """The model folder has no usable tokenizer; the text names the file."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json`. Raises TokenizerError, naming the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:
        raise TokenizerError(f"{path}: {exc}") from exc


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Lets go of the interpreter lock while it works (`Tokenizer.encode` does not)."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
