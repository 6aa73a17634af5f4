"""The official client works unchanged: sync and async, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.workers.server.fake import FakeEngine, LiveServer

TEXT = "the cat sat on the mat"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def script(live: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tokens = live.tokenizer.encode(TEXT, False)
    engine.script = lambda request: [*tokens, 0]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(live: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", logprobs=1)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens


async def test_async_chat(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT


async def test_async_completion_stream(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.completions.create(model="tiny", prompt="hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    engine.fail_at = engine.hold_at = 2
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(stream)
    engine.gate.set()
    with pytest.raises(openai.APIError, match="the fake engine failed"):
        list(stream)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
