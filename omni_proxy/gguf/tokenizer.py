"""A GGUF file's metadata -> tokenizer.json and tokenizer_config.json: byte-level BPE, split as its family splits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from omni_proxy.gguf.config import end_tokens
from omni_proxy.gguf.file import GgufError, GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are found in a text before it is split."""
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS: Final[Mapping[str, int]] = {"llama-bpe": 3, "qwen2": 1}
"""Digits that a token may have, by `tokenizer.ggml.pre`."""
_GPT2: Final = ("default", "gpt-2")
_GPT2_SINGLE_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r")


def tokenizer_json(file: GgufFile) -> str:
    """The content of tokenizer.json."""
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(f"{file.path}: tokenizer.ggml.model {kind!r} is not supported (gpt2 is)")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    pre = file.get("tokenizer.ggml.pre", "default")
    ranks = {token: at for at, token in enumerate(tokens)}
    model = models.BPE(vocab=ranks, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _splitting(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, file.get("tokenizer.ggml.token_type") or [])
    if file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        at = int(file.need("tokenizer.ggml.bos_token_id"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[at]} $A", special_tokens=[(tokens[at], at)]
        )
    return str(tokenizer.to_str())


def tokenizer_config(file: GgufFile) -> str:
    """The content of tokenizer_config.json: the chat template and the special tokens that it may write."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        at = file.get(f"tokenizer.ggml.{name}_token_id")
        if at is not None and int(at) < len(tokens):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            said[f"{short}_token"] = tokens[int(at)]
    template = file.get("tokenizer.chat_template")
    if template is not None:
        said["chat_template"] = template
    return json.dumps(said, ensure_ascii=False)


def generation_config(file: GgufFile) -> str:
    """The content of generation_config.json."""
    return json.dumps({"eos_token_id": end_tokens(file)})


def _splitting(file: GgufFile, pre: str) -> Any:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2_SINGLE_DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(parts)
    if pre in _DIGITS:
        words = pre_tokenizers.Split(Regex(_WORDS % _DIGITS[pre]), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*_GPT2, *_GPT2_SINGLE_DIGITS, *_DIGITS))
    raise GgufError(f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")


def _add_special(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
