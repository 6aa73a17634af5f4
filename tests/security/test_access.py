"""API keys and limits of tenants, over sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from omni_proxy.access.keys import hash_key, make_key, read_hash
from omni_proxy.config import ConfigError, parse
from tests.relay.conftest import Rig, Start
from tests.relay.raw import chat, post
from tests.relay.scripted import DONE, Seen, decode_answer, decode_stream, event, prefill_ok

ALICE, BOB, TOKEN = make_key(), make_key(), "operators-token"
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def tenants(**limits: int) -> dict[str, Any]:
    alice = {"keys": [hash_key(make_key()), hash_key(ALICE)], **limits}
    return {"access": {"tenants": {"alice": alice, "bob": {"keys": [hash_key(BOB)]}}}}


def shows(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


async def ask(rig: Rig, key: str = ALICE, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await rig.client.post(CHAT, json=BODY | fields, headers=shows(key) | (headers or {}))


def test_keys_are_long_and_only_their_hash_is_kept() -> None:
    assert ALICE != BOB
    assert len(ALICE) >= 40
    assert len(read_hash(hash_key(ALICE))) == 32
    assert ALICE not in hash_key(ALICE)


@pytest.mark.parametrize("key", ["omni-plain-key", "sha256:12", "sha256:" + "g" * 64])
def test_a_config_takes_hashes_only_and_does_not_repeat_keys(key: str) -> None:
    with pytest.raises(ConfigError, match=r"access\.tenants\.alice\.keys\[0\]: must be sha256:") as caught:
        parse({"access": {"tenants": {"alice": {"keys": [key]}}}}, "c")
    assert key not in str(caught.value)


def test_one_key_has_one_owner() -> None:
    both = {name: {"keys": [hash_key(ALICE)]} for name in ("a", "b")}
    with pytest.raises(ConfigError, match="access: tenants a and b have the same key"):
        parse({"access": {"tenants": both}}, "c")


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": ""}, {"authorization": "Bearer nobodys"}, {"authorization": f"Basic {ALICE}"},
     {"authorization": ALICE}, {"x-api-key": ALICE + "x"}, {"authorization": f"Bearer {ALICE}", "x-api-key": BOB},
     {"authorization": "Bearer " + hash_key(ALICE)}],
)  # fmt: skip
@pytest.mark.parametrize("chunked", [False, True])
async def test_without_a_key_nobody_comes_in(start: Start, headers: dict[str, str], chunked: bool) -> None:
    rig = await start(tenants())

    async def parts() -> Any:
        yield chat()

    body: dict[str, Any] = {"content": parts()} if chunked else {"json": BODY}
    answer = await rig.client.post(CHAT, headers=headers, **body)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert not any(ALICE in text for text in (answer.text, str(answer.headers)))
    assert rig.untouched()
    await rig.idle()


async def test_a_body_is_not_read_for_who_has_no_key(start: Start) -> None:
    rig = await start(tenants())
    client = await rig.raw()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n{")
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (401, "close")


@pytest.mark.parametrize("headers", [shows(ALICE), {"authorization": f"bearer  {ALICE}"}, {"x-api-key": ALICE}])
async def test_a_key_opens_and_stays_here(start: Start, headers: dict[str, str]) -> None:
    rig = await start(tenants())
    answer = await rig.client.post(CHAT, json=BODY, headers=headers | {"x-tenant-id": "bob", "x-kept": "1"})
    assert answer.status_code == 200
    for leg in ("p0", "d0"):
        seen = rig[leg].seen[0]
        assert not {"authorization", "x-api-key", "x-tenant-id"} & seen.headers.keys()
        assert seen.headers["x-kept"] == "1"
        assert ALICE.encode() not in seen.body
    (record,) = rig.gateway.scheduling.last(1)
    assert record.tenant == "alice"
    await rig.idle()


async def test_tenants_cannot_take_one_anothers_request_ids(start: Start) -> None:
    rig = await start(tenants())
    answers = [await ask(rig, key, {"x-request-id": "same"}) for key in (ALICE, BOB, ALICE)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 3
    ids = [[seen.headers["x-request-id"] for seen in rig[leg].seen] for leg in ("p0", "d0")]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3
    assert all(one.startswith("same-") for one in ids[0])


async def test_requests_a_minute(start: Start) -> None:
    rig = await start(tenants(requests_per_minute=2))
    first, second, third = [await ask(rig) for _ in range(3)]
    assert [r.status_code for r in (first, second, third)] == [200, 200, 429]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert "m" in first.headers["x-ratelimit-reset-requests"] or "s" in first.headers["x-ratelimit-reset-requests"]
    assert 1 <= int(third.headers["retry-after"]) <= 120
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests a minute" in error["message"]
    assert (await ask(rig, BOB)).status_code == 200
    assert "x-ratelimit-limit-requests" not in (await ask(rig, BOB)).headers
    assert len(rig["p0"].seen) == 4


async def test_tokens_a_minute_are_those_that_were_used(start: Start) -> None:
    """The workers count 10 of the prompt and 2 of the answer; what was set aside and not used comes back."""
    rig = await start(tenants(tokens_per_minute=200))
    first = await ask(rig, max_tokens=150)
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 50
    second = await ask(rig, max_tokens=150)
    assert second.status_code == 200
    assert 200 - 150 - 40 < int(second.headers["x-ratelimit-remaining-tokens"]) < 200 - 150 - 12
    third = await ask(rig, max_tokens=201)
    assert third.status_code == 429
    assert "more than the 200 a minute" in third.json()["error"]["message"]
    assert "retry-after" not in third.headers
    used = [await ask(rig) for _ in range(20)]
    refused = next(r for r in used if r.status_code == 429)
    assert refused.headers["x-ratelimit-limit-tokens"] == "200"
    assert int(refused.headers["retry-after"]) >= 1


async def test_requests_at_once(start: Start) -> None:
    release = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event("x"))
        await release.wait()
        await seen.chunk(event("", finish="stop"))
        await seen.chunk(DONE)
        await seen.end_stream()

    rig = await start(tenants(concurrent=2), p0=prefill_ok, d0=decode)
    clients = [await rig.raw() for _ in range(2)]
    for client in clients:
        await client.send(post(chat(stream=True), f"authorization: Bearer {ALICE}\r\n"))
        status, headers = await client.head()
        assert status == 200
        assert dict(headers)["x-ratelimit-limit-concurrent"] == "2"
    refused = await ask(rig, stream=True)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.headers["x-ratelimit-remaining-concurrent"] == "0"
    clients[0].reset()
    async with asyncio.timeout(5):
        while True:
            again = await rig.raw()
            await again.send(post(chat(stream=True), f"authorization: Bearer {ALICE}\r\n"))
            if (await again.head())[0] == 200:
                break
            again.close()
    release.set()
    await rig.idle()
    release.set()
    assert (await ask(rig, stream=True)).status_code == 200
    await rig.idle()


async def test_what_is_refused_holds_nothing(start: Start) -> None:
    rig = await start(tenants(concurrent=1))
    for _ in range(3):
        assert (await ask(rig, max_tokens="many")).status_code == 400
        assert (await ask(rig, model="other")).status_code == 404
        assert (await ask(rig, n=2)).status_code == 200
    await rig.idle()


async def test_other_routes_need_keys_too_and_operators_their_token(start: Start) -> None:
    rig = await start(tenants() | {"admin": {"port": 0, "token": TOKEN}})
    get = rig.client.get
    assert [(await get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
    assert [(await get(p)).status_code for p in ("/v1/models", "/openapi.json", "/metrics", "/nope")] == [401] * 4
    assert (await get("/v1/models", headers=shows(BOB))).status_code == 200
    for path in ("/metrics", "/omni/requests", "/omni/workers", "/omni/requests/x"):
        refused = await get(path, headers=shows(ALICE))
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        assert (await get(path, headers=shows(TOKEN))).status_code in (200, 404)


async def test_only_routes_of_the_list_are_served(start: Start) -> None:
    rig = await start({"access": {"routes": ["/v1/chat/completions", "/health", "/omni/*"]}})
    post_ = rig.client.post
    assert (await ask(rig)).status_code == 200
    for chunked in (False, True):
        refused = await post_("/v1/completions", **({"content": _parts()} if chunked else {"json": {}}))  # type: ignore[arg-type]
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    statuses = {path: (await rig.client.get(path)).status_code for path in ("/health", "/omni/workers", "/metrics")}
    assert statuses == {"/health": 200, "/omni/workers": 200, "/metrics": 404}


async def _parts() -> Any:
    yield b"{}"


async def test_keys_and_limits_change_while_it_serves(start: Start) -> None:
    rig = await start(tenants(requests_per_minute=3))
    assert [(await ask(rig)).status_code for _ in range(3)] == [200] * 3
    config = rig.gateway.front._config

    def use(access: dict[str, Any]) -> None:
        data = config.model_dump(mode="json") | access
        rig.gateway.front.configure(parse(data, "again"))

    use(tenants(requests_per_minute=4))
    assert [(await ask(rig)).status_code for _ in range(2)] == [200, 429]
    more = tenants(requests_per_minute=5)
    more["access"]["tenants"]["aaron"] = {"keys": [hash_key(make_key())]}
    use(more)
    assert [(await ask(rig)).status_code for _ in range(2)] == [200, 429], "counts follow their tenant"
    use({"access": {"tenants": {"bob": {"keys": [hash_key(BOB)]}}}})
    assert [(await ask(rig, key)).status_code for key in (ALICE, BOB)] == [401, 200]
    use({"access": {}})
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200


async def test_openais_client_understands_both_refusals(start: Start) -> None:
    rig = await start(tenants(requests_per_minute=1))

    def client(key: str) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(trust_env=False)
        return openai.AsyncOpenAI(
            api_key=key, base_url=f"http://127.0.0.1:{rig.port}/v1", max_retries=0, http_client=http
        )

    messages: Any = BODY["messages"]
    async with client("nobodys") as one:
        with pytest.raises(openai.AuthenticationError) as refused:
            await one.chat.completions.create(model="m", messages=messages)
        assert refused.value.code == "invalid_api_key"
    async with client(ALICE) as one:
        await one.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.RateLimitError) as limited:
            await one.chat.completions.create(model="m", messages=messages)
        assert limited.value.code == "rate_limit_exceeded"


async def test_anthropics_shape_for_its_route(start: Start) -> None:
    rig = await start(tenants(), p0=prefill_ok, d0=decode_stream)
    answer = await rig.client.post("/v1/messages", json=BODY | {"max_tokens": 5})
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"


async def test_an_answer_cut_short_is_paid_for(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for _ in range(50):
            await seen.chunk(event("word " * 10))
        await asyncio.sleep(5)

    rig = await start(tenants(tokens_per_minute=10_000), p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True), f"authorization: Bearer {ALICE}\r\n"))
    await client.reader.readuntil(b"word")
    await asyncio.sleep(0.1)
    client.reset()
    await rig.idle()
    rig["d0"].script = lambda seen: seen.answer(200, decode_answer())
    assert int((await ask(rig)).headers["x-ratelimit-remaining-tokens"]) < 10_000 - 50
