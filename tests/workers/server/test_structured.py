"""Structures, tools, echo and prompt log-probabilities through a real engine on a random model, over a socket."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import EngineConfig
from tests.workers.engine.architectures import CONFIGS, logits_of, write
from tests.workers.server.conftest import write_tokenizer
from tests.workers.server.fake import FakeEngine, LiveServer
from tests.workers.server.test_completions import events, say

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "feed", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "rest"}},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A server with a real engine whose model speaks at random."""
    folder = tmp_path_factory.mktemp("real")
    vocab = write_tokenizer(folder)
    write(folder, {**CONFIGS["qwen2"], "vocab_size": vocab + 8, "max_position_embeddings": 1024})
    engine = Engine(EngineConfig(str(folder), block_size=4, kv_cache_bytes=1 << 22, threads=1))
    engine.start()
    with LiveServer(engine, folder).serving() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client, folder
    engine.stop()


def answer(real: tuple[httpx.Client, Path], **body: Any) -> dict[str, Any]:
    response = real[0].post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 200, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


FORMATS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_schema_holds_whatever_the_model_would_say(real: tuple[httpx.Client, Path], how: str, seed: int) -> None:
    choice = answer(real, seed=seed, temperature=1.5, ignore_eos=True, min_tokens=150, **FORMATS[how])
    said = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert set(said) == {"name", "age"}
    assert said["name"] in ("cat", "dog")
    assert 0 <= said["age"] <= 99


def test_several_answers_each_keep_to_the_structure(real: tuple[httpx.Client, Path]) -> None:
    body = {"prompt": "hello", "n": 8, "max_tokens": 40, "guided_regex": "[ab]{3}(c|über)", "temperature": 2, "seed": 3}
    choices = real[0].post("/v1/completions", json=body).json()["choices"]
    assert all(re.fullmatch("[ab]{3}(c|über)", choice["text"]) for choice in choices)
    assert len({choice["text"] for choice in choices}) > 1


def test_structures_outlive_preemption_and_neighbours(real: tuple[httpx.Client, Path]) -> None:
    """Four answers in a cache that holds two of them: some are computed again in the middle."""
    engine = Engine(EngineConfig(str(real[1]), block_size=4, kv_cache_bytes=4 * 4 * 2 * 2 * 2 * 12 * 30, threads=1))
    engine.start()
    with LiveServer(engine, real[1]).serving() as server:
        body = {"prompt": "hello", "n": 4, "max_tokens": 70, "guided_regex": "[ab]{50}", "temperature": 1.0, "seed": 3}
        choices = httpx.post(server.url + "/v1/completions", json=body, timeout=60, trust_env=False).json()["choices"]
        assert engine.stats().preemptions > 0
    engine.stop()
    assert all(re.fullmatch("[ab]{50}", choice["text"]) for choice in choices)


def test_one_of_some_choices(real: tuple[httpx.Client, Path]) -> None:
    assert answer(real, guided_choice=["a.b", "c|d"])["message"]["content"] in ("a.b", "c|d")


def test_a_grammar(real: tuple[httpx.Client, Path]) -> None:
    said = answer(real, guided_grammar='start: "x" word\nword: "y" | "z"')["message"]["content"]
    assert said in ("xy", "xz")


def test_any_object(real: tuple[httpx.Client, Path]) -> None:
    choice = answer(real, response_format={"type": "json_object"}, temperature=0)
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called(real: tuple[httpx.Client, Path], stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "feed"}}
    name, arguments = only_call(real, stream, tool_choice=choice)
    assert name == "feed"
    assert set(json.loads(arguments)) == {"name", "age"}


@pytest.mark.parametrize("stream", [False, True])
def test_some_tool_is_called_where_one_is_required(real: tuple[httpx.Client, Path], stream: bool) -> None:
    name, arguments = only_call(real, stream, tool_choice="required", parallel_tool_calls=False, seed=5)
    assert name in ("feed", "rest")
    assert isinstance(json.loads(arguments), dict)


def only_call(real: tuple[httpx.Client, Path], stream: bool, **body: Any) -> tuple[str, str]:
    """Name and arguments of the one call, and checks of its shape."""
    whole = answer(real, tools=TOOLS, temperature=0, **body) if not stream else joined(real, body)
    message = whole["message"]
    assert (whole["finish_reason"], message["content"]) == ("tool_calls", None)
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    return call["function"]["name"], call["function"]["arguments"]


def joined(real: tuple[httpx.Client, Path], body: dict[str, Any]) -> dict[str, Any]:
    """A stream's chunks as a client puts them together."""
    asked = {"messages": HELLO, "max_tokens": 200, "tools": TOOLS, "temperature": 0, "stream": True, **body}
    chunks = events(real[0].post("/v1/chat/completions", json=asked))
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    pieces = [piece for entry in deltas for piece in entry["delta"].get("tool_calls", [])]
    first, *more = pieces
    for piece in more:
        assert set(piece) == {"index", "function"}
        first["function"]["arguments"] += piece["function"]["arguments"]
    assert not any(entry["delta"].get("content") for entry in deltas)
    return {"finish_reason": deltas[-1]["finish_reason"], "message": {"content": None, "tool_calls": [first]}}


def test_calls_that_the_model_makes_by_itself(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    text = 'Hm. <tool_call>{"name": "f"}</tool_call>'
    say(live, text, engine)
    body = {"messages": HELLO, "tools": [{"function": {"name": "f"}}]}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    choice = http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "tool_calls" not in choice["message"]
    assert 'finished_reason="stop"' in http.get("/metrics").text


def test_prompt_logprobs_are_those_of_the_model(real: tuple[httpx.Client, Path]) -> None:
    client, folder = real
    model = write(folder.parent / "again", json.loads((folder / "config.json").read_text()))
    tokens = tuple(range(20, 75))
    want = torch.log_softmax(logits_of(model, tokens), -1)
    for _ in range(2):  # the second time from a warm cache
        body = {"prompt": list(tokens), "max_tokens": 2, "prompt_logprobs": 3, "temperature": 0}
        first, *entries = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
        assert first is None
        assert len(entries) == len(tokens) - 1
        for at, entry in enumerate(entries):
            said = entry[str(tokens[at + 1])]
            assert said["logprob"] == pytest.approx(want[at, tokens[at + 1]].item(), abs=1e-3)
            assert said["rank"] == int((want[at] > want[at, tokens[at + 1]]).sum()) + 1
            assert max(entry, key=lambda i: entry[i]["logprob"]) == str(int(want[at].argmax()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_shows_the_prompt_and_its_logprobs(real: tuple[httpx.Client, Path], max_tokens: int, stream: bool) -> None:
    text = "the cat sat on the mat"
    body = {"prompt": text, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0, "stream": stream}
    response = real[0].post("/v1/completions", json=body)
    parts = [c["choices"][0] for c in events(response)[:-1]] if stream else response.json()["choices"]
    said = "".join(part["text"] for part in parts)
    assert said.startswith(text)
    lists: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    for part in parts:
        for name in lists:
            lists[name] += (part["logprobs"] or {name: []})[name]
    assert "".join(lists["tokens"])[: len(text)] == text
    assert lists["token_logprobs"][0] is None
    assert all(p < 0 for p in lists["token_logprobs"][1:])
    assert lists["text_offset"] == sorted(lists["text_offset"])
    count = real[0].post("/tokenize", json={"prompt": text}).json()["count"]
    assert {len(values) for values in lists.values()} == {count + max_tokens}
    assert (said == text) == (max_tokens == 0)


def test_prompt_logprobs_of_a_chat(real: tuple[httpx.Client, Path]) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    answered = real[0].post("/v1/chat/completions", json=body).json()
    ids = answered["prompt_token_ids"]
    assert [next(iter(entry)) for entry in answered["prompt_logprobs"][1:]] == [str(i) for i in ids[1:]]
