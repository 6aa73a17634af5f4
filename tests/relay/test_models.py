"""Several models in one gateway, and other names for them: pools, answers, model list, settings of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.config import ConfigError, parse
from tests.relay.conftest import Start
from tests.relay.scripted import DONE, Seen, prefill_ok, usage_event

CHAT = "/v1/chat/completions"
TEXT = 'it says \\"model\\":\\"big\\" and "model":"big"'


def answering(model: str) -> Any:
    """A worker that calls the model by a name of its own."""

    async def worker(seen: Seen) -> None:
        said = seen.json if seen.body.startswith((b"{", b" {")) else {}
        name = said.get("model")
        if not said.get("stream"):
            body = {"model": model, "choices": [{"message": {"content": TEXT}}], "asked": name}
            await seen.answer(200, json.dumps(body).encode())
            return
        await seen.open_stream()
        for text in ("a", TEXT):
            chunk = {"model": model, "choices": [{"index": 0, "delta": {"content": text}}]}
            await seen.chunk(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await seen.chunk(usage_event() + DONE)
        await seen.end_stream()

    return worker


TWO = {
    "models": [
        {"name": "big", "aliases": ["gpt-4", "default"], "priority": 3},
        {"name": "small", "schedule_mode": "aggregated"},
    ],
    "each": {
        "p0": {"models": {"big": "/data/big"}},
        "d0": {"models": {"big": "/data/big"}},
        "m0": {"models": ["small"], "connector": "aggregated"},
    },
}


async def test_each_model_has_its_own_workers(start: Start) -> None:
    """Faults P28."""
    rig = await start(TWO, p0=prefill_ok, d0=answering("/data/big"), m0=answering("small"))
    for model, asked in (("big", "/data/big"), ("gpt-4", "/data/big"), ("small", "small")):
        answer = await rig.chat(model=model)
        assert (answer.json()["model"], answer.json()["asked"]) == (model, asked)
    assert [s.json["model"] for s in rig["p0"].seen] == ["/data/big"] * 2
    assert [s.json["model"] for s in rig["d0"].seen] == ["/data/big"] * 2
    assert [s.json["model"] for s in rig["m0"].seen] == ["small"]
    assert {r.model for r in rig.gateway.scheduling.last(9)} == {"big", "small"}
    await rig.idle()


@pytest.mark.parametrize("asked", ["big", "gpt-4", "small"])
async def test_streams_say_what_the_client_said(start: Start, asked: str) -> None:
    rig = await start(TWO, p0=prefill_ok, d0=answering("/data/big"), m0=answering("small"))
    answer = await rig.chat(model=asked, stream=True)
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [c["model"] for c in chunks] == [asked] * 2
    assert chunks[1]["choices"][0]["delta"]["content"] == TEXT, "what a model writes is not a field"
    await rig.idle()


async def test_nothing_is_written_anew_without_an_alias(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=answering("m"))
    body = b'{ "messages":[{"role":"user","content":"x"}], "model":"m","z":1.50}'
    await rig.client.post(CHAT, content=body)
    assert rig["d0"].seen[0].body.startswith(body[:-1])
    await rig.idle()


async def test_an_alias_changes_only_the_model(start: Start) -> None:
    rig = await start(TWO, p0=prefill_ok, d0=answering("/data/big"), m0=answering("small"))
    body = b'{"z":[1.50,9223372036854775808],"model":"gpt-4","messages":[{"role":"user","content":"\\u00e9"}],"a":1}'
    await rig.client.post(CHAT, content=body)
    assert rig["d0"].seen[0].body.startswith(body[:-1].replace(b"gpt-4", b"/data/big"))
    form = await rig.client.post("/v1/audio/translations", files={"file": b"gpt-4"}, data={"model": "gpt-4"})
    assert form.status_code == 200
    assert b"\r\n/data/big\r\n" in rig["d0"].seen[1].body
    assert b"\r\ngpt-4\r\n" in rig["d0"].seen[1].body, "the file is not touched"
    await rig.idle()


async def test_the_model_list_has_all_of_them_with_their_fields(start: Start) -> None:
    rig = await start(TWO, p0=prefill_ok, d0=answering("big"), m0=answering("small"))
    listed = {entry["id"]: entry for entry in (await rig.client.get("/v1/models")).json()["data"]}
    assert set(listed) == {"big", "gpt-4", "default", "small"}
    assert listed["gpt-4"]["root"] == "big"
    assert all(entry["object"] == "model" for entry in listed.values())
    assert (await rig.client.get("/v1/models/gpt-4")).json() == listed["gpt-4"]
    unknown = await rig.client.get("/v1/models/some/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_an_unknown_model_is_404_in_openais_shape(start: Start, path: str) -> None:
    rig = await start(TWO, p0=prefill_ok, d0=answering("big"), m0=answering("small"))
    body = {"model": "gpt-5", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    answer = await rig.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["type"] == "not_found_error"
    assert "gpt-5" in error["message"]
    assert rig.untouched()


async def test_tokenize_needs_no_model_where_there_is_only_one(start: Start) -> None:
    rig = await start(m0=answering("m"))
    assert (await rig.client.post("/tokenize", json={"prompt": "model"})).status_code == 200
    assert rig["m0"].seen[0].json == {"prompt": "model"}
    rig = await start(TWO, p0=prefill_ok, d0=answering("big"), m0=answering("small"))
    answer = await rig.client.post("/tokenize", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


THINKING = {
    "models": [{"name": "m", "thinking": {"default": False, "budget_tokens": {"default": 100, "high": 900}}}],
}


@pytest.mark.parametrize(
    ("sent", "thinking", "budget"),
    [
        ({}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, 100),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False, None),
        ({"reasoning_effort": "high"}, True, 900),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, None),
        ({"reasoning_effort": 7}, False, None),
        ({"reasoning_effort": "high", "thinking_token_budget": 5}, True, 5),
    ],
)
async def test_thoughts_are_a_class_of_their_own(
    start: Start, sent: dict[str, Any], thinking: bool, budget: int | None
) -> None:
    rig = await start(THINKING, p0=prefill_ok, d0=answering("m"))
    assert (await rig.chat(**sent)).status_code == 200
    got = rig["d0"].seen[0].json
    assert got.get("thinking_token_budget") == budget
    assert {name: got[name] for name in sent} == sent, "thinking fields pass through"
    assert "thinking_token_budget" not in rig["p0"].seen[0].json
    await rig.idle()


def test_names_are_not_given_twice(tmp_path: Path) -> None:
    for models in ([{"name": "a"}, {"name": "a"}], [{"name": "a", "aliases": ["b"]}, {"name": "b"}]):
        with pytest.raises(ConfigError, match="same name"):
            parse({"models": models}, "x")
    with pytest.raises(ConfigError, match="name"):
        parse({"models": [{"aliases": ["x"]}]}, "x")
