"""Encoding piece by piece gives what encoding the whole gives, on real tokenizers and on made-up ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from omni_proxy.prompts import segments
from omni_proxy.prompts.chat_template import load_chat_template
from omni_proxy.prompts.segments import SegmentEncoder, TokenCache
from omni_proxy.prompts.text_tokenizer import encode
from tests.prompts import real_tokenizers
from tests.workers.server.conftest import make_tokenizer

WORDS = [
    "the",
    "cat",
    "don't",
    "naïve",
    "über",
    "日本語",
    "42",
    "x=1;",
    "\n",
    "\n\n",
    "  ",
    "\t",
    " ",
    "é\u0301",
    "🙂",
    "a\r\n",
    "A",
]
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "</s>",
    "[INST]",
    "<|",
    "<think>",
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(WORDS), st.sampled_from(MARKS), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    ),
    max_size=60,
).map(lambda parts: "".join(part + " " * (len(part) % 2) for part in parts))


@pytest.fixture(scope="session", params=real_tokenizers.NAMES)
def real(request: pytest.FixtureRequest) -> SegmentEncoder:
    place = real_tokenizers.folder(request.param, Path(request.config.cache.mkdir("tokenizers")))
    return SegmentEncoder(real_tokenizers.load(place))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHUNK_CHARS", 7)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(TEXTS, st.booleans())
def test_pieces_together_are_the_whole(
    real: SegmentEncoder, short_chunks: None, text: str, add_special_tokens: bool
) -> None:
    expected = encode(real._tokenizer, text, add_special_tokens)
    assert list(real.encode(text, add_special_tokens)) == expected
    assert list(real.encode(text, add_special_tokens)) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(TEXTS, st.booleans())
def test_pieces_of_a_small_tokenizer_are_the_whole(short_chunks: None, text: str, add_special_tokens: bool) -> None:
    assert list(SMALL.encode(text, add_special_tokens)) == encode(SMALL._tokenizer, text, add_special_tokens)


SMALL = SegmentEncoder(make_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("name", real_tokenizers.NAMES)
def test_what_can_be_cut_is_known(name: str, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    place = real_tokenizers.folder(name, Path(pytestconfig.cache.mkdir("tokenizers")))
    encoder = SegmentEncoder(real_tokenizers.load(place))
    assert (encoder.cuts_at_marks, encoder.cuts_inside) == (name != "llama2",) * 2


def prose(seed: int, chars: int) -> str:
    """Words that do not come again, so that nothing is cheap by luck."""
    random = Random(seed)
    words = ["alpha", "beta", "Gamma", "delta's", "42", "\u00fcber", "f(x)", "end.\n", "\u65e5\u672c", "-", "word"]
    return " ".join(random.choice(words) + str(random.randrange(50)) for _ in range(chars // 6))[:chars]


@pytest.mark.slow
@pytest.mark.parametrize("name", real_tokenizers.BYTE_LEVEL)
def test_long_texts_are_cut_and_equal_the_whole(name: str, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    place = real_tokenizers.folder(name, Path(pytestconfig.cache.mkdir("tokenizers")))
    encoder = SegmentEncoder(real_tokenizers.load(place))
    text = prose(1, 60_000)
    assert list(encoder.encode(text)) == encode(encoder._tokenizer, text, False)
    pieces = encoder.cache.misses
    assert pieces >= 10
    assert list(encoder.encode(text + prose(2, 2000))) == encode(encoder._tokenizer, text + prose(2, 2000), False)
    assert encoder.cache.misses <= pieces + 2  # text that grows keeps its parts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_the_next_turn_costs_its_new_text(name: str, pytestconfig: pytest.Config) -> None:
    """Rendering and encoding the next turn of a 30 KB conversation takes a tenth of the CPU of encoding it whole."""
    assert pytestconfig.cache is not None
    place = real_tokenizers.folder(name, Path(pytestconfig.cache.mkdir("tokenizers")))
    tokenizer, template = real_tokenizers.load(place), load_chat_template(place)
    assert template is not None
    chat = [{"role": ("user", "assistant")[turn % 2], "content": prose(turn, 1500)} for turn in range(21)]
    encoder = SegmentEncoder(tokenizer)
    encoder.encode(template.render(chat))
    longer = [*chat, {"role": "assistant", "content": prose(100, 300)}, {"role": "user", "content": prose(101, 300)}]
    before = encoder.cache.misses
    text = template.render(longer)
    incremental, ids = cpu_seconds(lambda: list(encoder.encode(text)))
    whole, expected = cpu_seconds(lambda: encode(tokenizer, text, False))
    assert ids == expected
    assert len(text) > 30_000
    assert encoder.cache.misses - before <= 6
    assert incremental < whole / 5  # a tenth on a quiet machine (benchmarks/apc); caches are cold here on both sides


def cpu_seconds(work: Callable[[], list[int]]) -> tuple[float, list[int]]:
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = TokenCache(max_bytes=5000)
    encoder = SegmentEncoder(make_tokenizer(), cache)
    for number in range(100):
        encoder.encode(f"text number {number}")
        assert cache.size_bytes <= 5000
    hits = cache.hits
    encoder.encode("text number 99")
    assert cache.hits == hits + 1
    encoder.encode("text number 0")
    assert cache.hits == hits + 1


@pytest.mark.parametrize("change", ["prefix", "lstrip", "truncation"])
def test_tokenizers_that_look_around_encode_whole_texts(change: str) -> None:
    from tokenizers import AddedToken, pre_tokenizers

    tokenizer: Tokenizer = make_tokenizer()
    if change == "prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "lstrip":
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    else:
        tokenizer.enable_truncation(5)
    encoder = SegmentEncoder(tokenizer)
    text = "a <|im_start|>hello the cat <mask> sat on the mat and more words to come"
    assert not encoder.cuts_at_marks
    assert list(encoder.encode(text)) == encode(tokenizer, text, False)
