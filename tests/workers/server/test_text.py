"""The detokeniser equals the whole decode, stop strings cut at the first match: on random input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from omni_proxy.prompts.text_tokenizer import TokenizerError
from omni_proxy.workers.engine.choice import Choice
from omni_proxy.workers.engine.text import ModelTokenizer, StopStrings
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, Output, SamplingParams
from tests.workers.server.conftest import CORPUS, make_tokenizer

BYTE_LEVEL = ModelTokenizer(make_tokenizer())


def make_metaspace() -> Tokenizer:
    """SentencePiece-like: word borders are a visible character, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


METASPACE = ModelTokenizer(make_metaspace())


def pieces(tokenizer: ModelTokenizer, tokens: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.detokenizer(skip)
    return [*map(stream.push, tokens), stream.finish()]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_random_text_comes_back_piece_by_piece(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, False)
    parts = pieces(BYTE_LEVEL, tokens, skip=False)
    assert "".join(parts) == BYTE_LEVEL.decode(tokens, False) == text
    assert all("\ufffd" not in part or "\ufffd" in text for part in parts)


@given(tokens=st.lists(st.integers(0, 399)), skip=st.booleans())
def test_random_tokens_equal_the_whole_decode(tokens: list[int], skip: bool) -> None:
    assert "".join(pieces(BYTE_LEVEL, tokens, skip)) == BYTE_LEVEL.decode(tokens, skip)


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_sentencepiece_text_equals_the_whole_decode(text: str) -> None:
    tokens = METASPACE.encode(text, False)
    parts = pieces(METASPACE, tokens, skip=False)
    assert "".join(parts) == METASPACE.decode(tokens, False)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"])), stop=st.sampled_from([(), ("ab", "bca")]))
def test_an_answer_can_be_continued_from_the_tokens_of_any_delta_with_text(
    tokenizer: ModelTokenizer, text: str, stop: tuple[str, ...]
) -> None:
    """By a worker that has the prompt and these tokens for its prompt, and never saw the text."""
    prompt = tokenizer.encode("some prompt", False)
    tokens = [t for t in tokenizer.encode("x" + text + "abab bcbca", False) if t not in tokenizer.special_ids]
    whole = _stream(tokenizer, prompt, tokens, ())
    shown = ""
    *before_the_last, _ = _stream(tokenizer, prompt, tokens, stop)
    for count, part in enumerate(before_the_last, 1):
        shown += part
        if part:
            rest = _stream(tokenizer, prompt + tokens[:count], tokens[count:], ())
            assert shown + "".join(rest) == "".join(whole)


def _stream(tokenizer: ModelTokenizer, prompt: list[int], tokens: list[int], stop: tuple[str, ...]) -> list[str]:
    request = EngineRequest("r", tuple(prompt), SamplingParams(max_tokens=len(tokens) + 1))
    choice = Choice(0, request, tokenizer.detokenizer(True, prompt), StopStrings(stop))
    parts = []
    for at, token in enumerate(tokens):
        end = FinishReason.LENGTH if at == len(tokens) - 1 else None
        parts.append(choice.feed(Output("r", (token,), finish_reason=end)).text)
        if choice.finish_reason is not None:
            break
    return parts


def test_unfinished_characters_show_only_at_the_end() -> None:
    tokens = BYTE_LEVEL.encode("𓀀", False)
    assert len(tokens) > 2
    parts = pieces(BYTE_LEVEL, tokens[:-1])
    assert parts[:-1] == [""] * (len(tokens) - 1)
    assert set(parts[-1]) == {"\ufffd"}


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokens = BYTE_LEVEL.encode("<|im_start|>hi<|im_end|>", False)
    assert "".join(pieces(BYTE_LEVEL, tokens)) == "hi"
    assert "".join(pieces(BYTE_LEVEL, tokens, skip=False)) == "<|im_start|>hi<|im_end|>"


LETTERS = st.text("ab", max_size=30)


@given(
    parts=st.lists(LETTERS), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), include=st.booleans()
)
def test_stop_strings_cut_where_a_search_over_the_whole_text_would(
    parts: list[str], stops: list[str], include: bool
) -> None:
    cutter = StopStrings(stops, include)
    shown = ""
    text = ""
    for part in parts:
        text += part
        shown += cutter.feed(part)
        if cutter.matched is not None:
            break
        assert text.startswith(shown)
    if cutter.matched is None:
        shown += cutter.flush()
        assert shown == text
        assert not any(stop in text for stop in stops)
        return
    first = min(text.find(stop) for stop in stops if stop in text)
    assert text.startswith(cutter.matched, first)
    assert shown == text[:first] + (cutter.matched if include else "")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    cutter = StopStrings(["\n\nUser:"])
    assert cutter.feed("hello\n") == "hello"
    assert cutter.feed("world") == "\nworld"
    assert cutter.feed("!") == "!"


def test_a_missing_or_broken_tokenizer_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        ModelTokenizer.load(tmp_path)
