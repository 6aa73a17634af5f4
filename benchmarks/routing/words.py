"""A model folder without a model: a word-level tokenizer that counts as the pretending workers do."""

import json
from pathlib import Path
from typing import Any

from omni_proxy.sim.bench.prompts import WORDS


def write_word_model(folder: Path) -> Path:
    """Write `tokenizer.json` and a chat template that adds nothing; returns the folder."""
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    vocabulary["[UNK]"] = WORDS
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
