"""Real OpenAI servers without a handoff behind the gateway: `pytest -m real_server`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.real_engines.asking import CHAT, COMPLETIONS, body, events, stream, text_of, words
from tests.real_engines.processes import Gateway, Server, gateway, until
from tests.real_engines.servers import KINDS, server

pytestmark = [pytest.mark.real_server, pytest.mark.timeout(900)]

NAME = "a-model"
"""By which clients know it."""
PATHS = (CHAT, COMPLETIONS)


def with_id() -> dict[str, str]:
    """llama-cpp-python takes only UUIDs for a request's id."""
    return {"x-request-id": str(uuid4())}


class Behind:
    """A server, and a gateway before it."""

    def __init__(self, server: Server, gateway: Gateway, model: str) -> None:
        self.server = server
        self.gateway = gateway
        self.model = model

    def ask(self, path: str, asked: dict[str, object]) -> httpx.Response:
        """Through the gateway."""
        return self.gateway.post(path, asked, x_request_id=str(uuid4()))

    def streaming(self, asked: dict[str, object]) -> AbstractContextManager[httpx.Response]:
        """A stream of a completion through the gateway."""
        whole = {**asked, "stream": True}
        url = self.gateway.url + COMPLETIONS
        return httpx.stream("POST", url, json=whole, headers=with_id(), timeout=300, trust_env=False)

    def own(self, asked: dict[str, object]) -> dict[str, object]:
        """The same for the server itself, which knows its model by another name."""
        return {**asked, "model": self.model}


@pytest.fixture(scope="module", params=sorted(KINDS))
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    kind = KINDS[request.param]
    reason = kind.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("server")
    started = server(request.param, folder)
    started.start()
    try:
        started.ready(kind.ready)
        worker = {"name": "m0", "url": started.url, "role": "mixed", "models": {NAME: kind.model()}}
        with gateway("gateway", folder, {"workers": [worker]}) as gate:
            yield Behind(started, gate, kind.model())
    finally:
        started.stop()


@pytest.fixture
def behind(serving: Behind) -> Behind:
    """The server alive, and used."""
    if not serving.server.alive:
        serving.server.start()
    serving.gateway.all_up()
    return serving


def asking(path: str, seed: int, tokens: int = 12, **fields: object) -> dict[str, object]:
    text = f"{words(seed, 20)} Once upon a time there was a"
    return body(path, text, tokens, **{"model": NAME, **fields})


def test_it_is_taken_for_what_it_is(behind: Behind) -> None:
    (worker,) = behind.gateway.workers().values()
    assert (worker["connector"], worker["role"], worker["models"]) == ("aggregated", "mixed", [NAME])


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_the_servers_own(behind: Behind, path: str) -> None:
    asked = asking(path, 1)
    answer = behind.ask(path, asked)
    alone = behind.server.post(path, behind.own(asked))
    assert (answer.status_code, alone.status_code) == (200, 200), answer.text
    assert text_of(path, answer.json()) == text_of(path, alone.json()) != ""
    assert answer.json()["usage"] == alone.json()["usage"]
    assert answer.json()["model"] == NAME
    timeline = behind.gateway.timeline(answer)
    assert (timeline["mode"], timeline["outcome"]) == ("aggregated", "completed")
    assert timeline["workers"] == {"decode": "m0"}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_the_same(behind: Behind, path: str) -> None:
    asked = asking(path, 2, stream_options={"include_usage": True})
    text, response, told = stream(behind.gateway, path, asked, headers=with_id())
    alone, _, own = stream(behind.server, path, behind.own(asked))
    assert text == alone != ""
    assert [event.get("usage") for event in told] == [event.get("usage") for event in own]
    assert {event["model"] for event in told} == {NAME}
    timeline = behind.gateway.timeline(response)
    assert (timeline["outcome"], timeline["ttft_s"] > 0) == ("completed", True)


@pytest.mark.parametrize("path", PATHS)
def test_what_it_refuses_is_told_in_its_own_words(behind: Behind, path: str) -> None:
    asked = asking(path, 3, frequency_penalty="hot")
    mine, its = behind.ask(path, asked), behind.server.post(path, behind.own(asked))
    assert mine.status_code == its.status_code >= 400
    assert mine.content == its.content
    assert mine.headers["content-type"] == its.headers["content-type"]


def test_a_client_that_leaves_takes_nothing_with_it(behind: Behind) -> None:
    asked = asking(COMPLETIONS, 4, tokens=1500)
    with behind.streaming(asked) as response:
        next(events(response))
    until(lambda: behind.gateway.metric("omni_requests_live") == 0, 20)
    answer = behind.ask(COMPLETIONS, asking(COMPLETIONS, 5))
    assert answer.status_code == 200, answer.text


def test_a_server_that_dies_is_no_clean_end(behind: Behind) -> None:
    asked = asking(COMPLETIONS, 6, tokens=1500)
    last: Any = None

    def read() -> None:
        nonlocal last
        with behind.streaming(asked) as got:
            for event in events(got):
                last = event
                behind.server.kill()

    with pytest.raises(httpx.RemoteProtocolError):
        read()
    assert last["error"]["code"] == "worker_closed"
    until(lambda: behind.gateway.workers()["m0"]["state"] == "down")
    refused = behind.ask(COMPLETIONS, asking(COMPLETIONS, 7))
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
