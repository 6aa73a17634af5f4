"""Prompts of every shape become tokens and keys, as the model's own library makes them; what cannot is no error."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_proxy import token_routes
from omni_proxy.apc.keys import block_keys
from omni_proxy.call import CHAT, COMPLETIONS, parse_call
from omni_proxy.errors import Rejected
from omni_proxy.messages import Tokenized
from omni_proxy.prompts.chat_template import ChatTemplateError, load_chat_template
from omni_proxy.prompts.media import media_of
from omni_proxy.tokenizer import PromptTokenizer, PromptTokens, TokenCounter, open_end
from tests.prompts import real_tokenizers

WORDS = "the cat sat on the mat and the dog ate the bread and " * 8


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> PromptTokenizer:
    return PromptTokenizer.load(tokenizer_dir, adapters={"adapter"})


def read(tokenizer: PromptTokenizer, body: dict[str, Any], model: str = "m") -> PromptTokens | None:
    path = CHAT if "messages" in body else COMPLETIONS
    return tokenizer.read(parse_call(path, msgspec.json.encode({"model": model, **body})))


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_prompts_of_every_shape(tokenizer: PromptTokenizer) -> None:
    text = read(tokenizer, {"prompt": WORDS})
    assert text is not None
    assert text.ids is not None
    assert text.keys == block_keys(text.ids)
    assert text.count == len(text.ids)
    assert read(tokenizer, {"prompt": [WORDS]}) == text
    assert read(tokenizer, {"prompt": list(text.ids)}) == text
    assert read(tokenizer, {"prompt": [list(text.ids)]}) == text
    assert read(tokenizer, {"prompt": [WORDS, WORDS]}) == PromptTokens(2 * text.count)
    assert read(tokenizer, {"prompt": [[1, 2], [3]]}) == PromptTokens(3)


def test_salts_and_adapters_have_keys_of_their_own(tokenizer: PromptTokenizer) -> None:
    plain = read(tokenizer, chat(WORDS))
    salted = read(tokenizer, chat(WORDS, cache_salt="s"))
    adapter = read(tokenizer, chat(WORDS), model="adapter")
    assert plain is not None and salted is not None and adapter is not None  # noqa: PT018
    assert plain.ids == salted.ids == adapter.ids
    assert len({plain.keys, salted.keys, adapter.keys}) == 3
    assert salted.keys == block_keys(salted.ids or (), salt="s")
    assert adapter.keys == block_keys(adapter.ids or (), lora="adapter")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"},
        {"messages": [{"role": "user", "content": "x"}], "documents": []},
        {"messages": [{"role": "user", "content": "x"}], "tools": 5, "chat_template_kwargs": 7},
        {"prompt": [1 << 40]},
        {"prompt": [-1]},
        {"prompt": "x", "suffix": "y"},
    ],
)
async def test_what_cannot_be_read_falls_back_and_is_counted(tokenizer: PromptTokenizer, body: dict[str, Any]) -> None:
    posted: asyncio.Queue[Tokenized] = asyncio.Queue()
    counter = TokenCounter(tokenizer, posted.put_nowait)
    path = CHAT if "messages" in body else COMPLETIONS
    counter("r", parse_call(path, msgspec.json.encode({"model": "m", **body})))
    assert await asyncio.wait_for(posted.get(), 10) == Tokenized("r", None)
    assert counter.fallbacks == 1
    counter("s", parse_call(CHAT, msgspec.json.encode({"model": "m", **chat(WORDS)})))
    answer = await asyncio.wait_for(posted.get(), 10)
    assert answer.prompt_tokens is not None
    assert len(answer.block_keys) == answer.prompt_tokens // 16
    counter.close()


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]},
    {"messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}},
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " Well, the  "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
]


@cache
def _reference(transformers: Any, place: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(place)


@pytest.mark.slow
@pytest.mark.parametrize("body", CHATS)
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_chats_are_read_as_transformers_reads_them(
    name: str, body: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    transformers = pytest.importorskip("transformers")
    assert pytestconfig.cache is not None
    place = real_tokenizers.folder(name, Path(pytestconfig.cache.mkdir("tokenizers")))
    template = load_chat_template(place)
    reference = _reference(transformers, place)
    if template is None or reference.chat_template is None:
        pytest.skip("no chat template in this package")
    options = {k: v for k, v in body.items() if k not in ("messages", "chat_template_kwargs")}
    expected = reference.apply_chat_template(
        body["messages"],
        tokenize=False,
        **{"add_generation_prompt": True, **options},
        **body.get("chat_template_kwargs", {}),
    )
    told = read(PromptTokenizer(real_tokenizers.load(place), template), body)
    assert told is not None
    assert list(told.ids or ()) == reference.encode(expected, add_special_tokens=False)
    assert list(told.ids or ()).count(reference.bos_token_id) <= 1


def test_an_open_end_must_be_there() -> None:
    assert open_end("<u>a<a> b  <end>", [{"content": " b  "}]) == "<u>a<a> b  "
    assert open_end("<u>a<a>b<end>", [{"content": " b  "}]) == "<u>a<a>b"
    with pytest.raises(ChatTemplateError):
        open_end("<u>", [{"content": "b"}])


def test_images_are_part_of_the_prefixs_name(tokenizer: PromptTokenizer) -> None:
    """The same image before the same text is the same prefix; another image is another, from there on."""

    def keys(url: str, text: str) -> tuple[int, ...]:
        content = [
            {"type": "text", "text": "word " * 64},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": text * 64},
        ]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        call = parse_call(CHAT, msgspec.json.encode(body))
        call.media = media_of(call)
        found = tokenizer.read(call)
        assert found is not None
        assert found.ids is None, "a worker must not get them"
        return found.keys

    one, same, longer, other = keys("a", "x "), keys("a", "x "), keys("a", "x y "), keys("b", "x ")
    assert one == same
    common = sum(a == b for a, b in zip(one, other, strict=False))
    assert 0 < common < len(one)
    assert sum(a == b for a, b in zip(one, longer, strict=False)) > common


def route(tokenizer: PromptTokenizer, path: str, **fields: Any) -> Any:
    call = parse_call(path, msgspec.json.encode({"model": "m"} | fields))
    return msgspec.json.decode(token_routes.answer(tokenizer, call))


def test_the_gateway_tokenises_in_vllms_words(tokenizer: PromptTokenizer) -> None:
    said = route(tokenizer, "/tokenize", prompt=WORDS, add_special_tokens=False, return_token_strs=True)
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert route(tokenizer, "/detokenize", tokens=said["tokens"]) == {"prompt": WORDS}
    chat = route(tokenizer, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    read_ids = read(tokenizer, {"messages": [{"role": "user", "content": "hi"}]})
    assert read_ids is not None
    assert read_ids.ids is not None
    assert (chat["tokens"], chat["token_strs"]) == (read_ids.ids.tolist(), None)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, None),
        ("/tokenize", {"messages": "x"}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(
    tokenizer: PromptTokenizer, path: str, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(Rejected) as refused:
        route(tokenizer, path, **fields)
    assert refused.value.param == param
