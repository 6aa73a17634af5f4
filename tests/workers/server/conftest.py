from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from omni_proxy.workers.engine.types import EngineInfo
from tests.workers.server.fake import BLOCK_SIZE, NUM_BLOCKS, FakeEngine, LiveServer

TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CORPUS = [
    "hello world, this is a small tokenizer for tests; it knows the words that are repeated here.",
    "the cat sat on the mat and the dog ate the bread. über naïve 日本語 emoji 🙂🚀",
]


def make_tokenizer() -> Tokenizer:
    """A small byte-level BPE tokenizer; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> int:
    """That tokenizer with a chat template in the Hugging Face layout; returns its vocabulary's size."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    return folder


def new_engine() -> FakeEngine:
    return FakeEngine(
        EngineInfo(
            model_type="fake",
            max_model_len=128,
            vocab_size=400,
            eos_token_ids=frozenset({0}),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            block_bytes=1024,
            dtype="float32",
            side_channel_port=5601,
        )
    )


@pytest.fixture(scope="session")
def shared_server(tokenizer_dir: Path) -> Iterator[tuple[FakeEngine, LiveServer]]:
    engine = new_engine()
    engine.start()
    with LiveServer(engine, tokenizer_dir).serving() as server:
        yield engine, server
    engine.stop()


@pytest.fixture
def engine(shared_server: tuple[FakeEngine, LiveServer]) -> FakeEngine:
    engine = shared_server[0]
    engine.reset()
    return engine


@pytest.fixture
def live(shared_server: tuple[FakeEngine, LiveServer], engine: FakeEngine) -> LiveServer:
    return shared_server[1]


@pytest.fixture
def own_server(tokenizer_dir: Path) -> Iterator[LiveServer]:
    """A server and engine of this test alone, for tests that end them or read their counters."""
    engine = new_engine()
    engine.start()
    with LiveServer(engine, tokenizer_dir).serving() as server:
        yield server
    engine.stop()


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=10, trust_env=False) as client:
        yield client
