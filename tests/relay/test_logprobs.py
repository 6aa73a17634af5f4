"""Log-probabilities: of the whole answer with its first token, and of the prompt only from who computed it (R10)."""

from __future__ import annotations

import json

import pytest

from tests.relay.conftest import Start
from tests.relay.scripted import DONE, Seen, decode_answer, prefill_answer

ASKED = {"logprobs": True, "top_logprobs": 2}
FIRST, SECOND = ({"token": t, "logprob": -0.25, "bytes": None, "top_logprobs": []} for t in ("Hel", "lo"))


async def decode(seen: Seen) -> None:
    """D whose answer has the log-probabilities of all its tokens, the first among them."""
    assert seen.json["logprobs"] is True
    if not seen.json.get("stream"):
        body = json.loads(decode_answer("Hello"))
        body["choices"][0]["logprobs"] = {"content": [FIRST, SECOND]}
        await seen.answer(200, json.dumps(body).encode())
        return
    await seen.open_stream()
    for token in (FIRST, SECOND):
        delta = {"index": 0, "delta": {"content": token["token"]}, "logprobs": {"content": [token]}}
        await seen.chunk(b"data: " + json.dumps({"choices": [delta]}).encode() + b"\n\n")
    await seen.chunk(DONE)
    await seen.end_stream()


@pytest.mark.parametrize("connector", ["vllm-nixl", "sglang"])
async def test_the_first_token_is_not_missing(start: Start, connector: str) -> None:
    """P's token is either made again by D or handed to it; in the second case P is asked for them too."""

    async def prefill(seen: Seen) -> None:
        assert ("logprobs" in seen.json) == (connector == "sglang")
        await seen.answer(200, prefill_answer())

    rig = await start({"connector": connector}, p0=prefill, d0=decode)
    answer = await rig.chat(**ASKED)
    assert answer.json()["choices"][0]["logprobs"] == {"content": [FIRST, SECOND]}
    streamed = await rig.chat(**ASKED, stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [token for e in events for token in e["choices"][0]["logprobs"]["content"]] == [FIRST, SECOND]
    await rig.idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "logprob_start_len": 0},
        {"prompt_logprobs": 0},
    ],
)
async def test_those_of_the_prompt_come_from_one_worker(start: Start, fields: dict[str, object]) -> None:
    said = [None, {"7": {"logprob": -1.5}}]

    async def alone(seen: Seen) -> None:
        assert fields.items() <= seen.json.items()
        body = json.loads(decode_answer("Hello"))
        await seen.answer(200, json.dumps({**body, "prompt_logprobs": said}).encode())

    rig = await start(m0=alone)
    assert (await rig.chat(**fields)).json()["prompt_logprobs"] == said
    rig = await start({"connector": "sglang"})
    refused = await rig.chat(**fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, list(fields)[-1])
    assert rig.untouched()


async def test_below_zero_it_is_about_the_answer(start: Start) -> None:
    rig = await start({"connector": "sglang"})
    assert (await rig.chat(return_logprob=True, logprob_start_len=-1)).status_code == 200
    assert rig["p0"].seen
