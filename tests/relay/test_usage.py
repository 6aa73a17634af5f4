"""Usage as the client sees it: D's counts with P's cached tokens (faults M1, M2, R14, S6)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from omni_proxy.api.sse import read_usage, splice
from omni_proxy.messages import Usage
from tests.relay.conftest import Start
from tests.relay.scripted import DONE, Script, Seen, decode_answer, event, prefill_answer, usage_event

WITH_AND_WITHOUT_PUMP = True

D_SAYS = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def prefill(cached: int | None) -> Script:
    async def script(seen: Seen) -> None:
        await seen.answer(200, prefill_answer(cached=cached))

    return script


def decode(usage: Any, *, continuous: bool = False) -> Script:
    """D with this usage, in a stream at its end or, with `continuous`, in every event."""
    raw = usage if isinstance(usage, bytes) else json.dumps(usage).encode()

    async def script(seen: Seen) -> None:
        if not seen.json.get("stream"):
            await seen.answer(200, decode_answer().rsplit(b'"usage"', 1)[0] + b'"usage": ' + raw + b"}")
            return
        with_usage = event("a")[:-3] + b',"usage":' + raw + b"}\n\n"
        last = b'data: {"id":"d","choices":[],"usage":' + raw + b"}\n\n"
        await seen.open_stream()
        for part in [with_usage, with_usage] if continuous else [event("a"), event("b")]:
            await seen.chunk(part)
        await seen.chunk(last)
        await seen.chunk(DONE)
        await seen.end_stream()

    return script


async def told(rig: Any, stream: bool) -> Any:
    """The usage in the client's answer, in a stream the last one."""
    if not stream:
        return (await rig.chat()).json().get("usage")
    answer = await rig.chat(stream=True, stream_options={"include_usage": True})
    events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e and e != "data: [DONE]"]
    return events[-1]["usage"]


CASES: dict[str, tuple[int | None, Any, Any]] = {
    "both say": (3, {"cached_tokens": 9}, {"cached_tokens": 3}),
    "p's null is nothing": (None, {"cached_tokens": 9}, {"cached_tokens": 0}),
    "other details stay": (
        3,
        {"audio_tokens": 1, "cached_tokens": 9, "x": [1]},
        {"audio_tokens": 1, "cached_tokens": 3, "x": [1]},
    ),
    "d does not say which": (3, {"audio_tokens": 1}, {"audio_tokens": 1, "cached_tokens": 3}),
    "d's null": (3, {"cached_tokens": None}, {"cached_tokens": 3}),
    "d tells no details": (3, None, None),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_ps(start: Start, stream: bool) -> None:
    rig = await start()
    for name, (cached, details, expected) in CASES.items():
        rig["p0"].script = prefill(cached)
        thinking = {"completion_tokens_details": {"reasoning_tokens": 2}}
        rig["d0"].script = decode({**D_SAYS, "prompt_tokens_details": details, **thinking})
        usage = await told(rig, stream)
        assert (name, usage) == (name, {**D_SAYS, "prompt_tokens_details": expected, **thinking})
    rig["d0"].script = decode(D_SAYS)
    assert await told(rig, stream) == D_SAYS
    await rig.idle()


async def test_the_timeline_counts_the_same(start: Start) -> None:
    rig = await start(p0=prefill(4), d0=decode({**D_SAYS, "prompt_tokens_details": {"cached_tokens": 9}}))
    for fields in ({}, {"stream": True}):
        timeline = await rig.timeline(await rig.chat(**fields))
        counts = timeline["prompt_tokens"], timeline["cached_tokens"], timeline["generated_tokens"]
        assert counts == (10, 4, 3)


STRANGE = [
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b"{}",
    b'{"prompt_tokens":1.5}',
    b'{"prompt_tokens":-1,"completion_tokens":"many"}',
    b'{"prompt_tokens":5,"prompt_tokens_details":[1]}',
    b'{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":"x"}}',
]


@pytest.mark.parametrize("stream", [False, True])
async def test_strange_usage_passes_and_harms_nobody(start: Start, stream: bool) -> None:
    rig = await start()
    for raw in STRANGE:
        rig["d0"].script = decode(raw)
        usage = await told(rig, stream)
        if raw != STRANGE[-1]:  # there P's number replaces what was not one
            assert usage == json.loads(raw)
    await rig.idle()


async def test_usage_in_every_event(start: Start) -> None:
    """`continuous_usage_stats`: P's cached tokens in each, and the last one counts."""
    usage = {**D_SAYS, "prompt_tokens_details": {"cached_tokens": 9}}
    rig = await start(p0=prefill(3), d0=decode(usage, continuous=True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await rig.chat(stream=True, stream_options=options)
    assert answer.text.count('{"cached_tokens":3}') == 3
    assert "9}" not in answer.text
    assert (await rig.timeline(answer))["generated_tokens"] == 3
    await rig.idle()


async def test_usage_that_only_we_wanted_is_taken_out_alone(start: Start) -> None:
    """An event with choices stays even where it carries usage."""
    rig = await start(p0=prefill(3), d0=decode({**D_SAYS}, continuous=True))
    answer = await rig.chat(stream=True)
    assert answer.text.count('"usage"') == 2
    assert '"choices":[]' not in answer.text
    assert answer.content.endswith(DONE)


async def test_usage_cut_over_reads(start: Start) -> None:
    whole = event("a") + usage_event() + DONE

    async def script(seen: Seen) -> None:
        at = seen.json["seed"]
        await seen.open_stream()
        for part in (whole[:at], whole[at:]):
            await seen.chunk(part)
        await seen.end_stream()

    rig = await start(p0=prefill(3), d0=script)
    for at in range(len(event("a")), len(whole), 7):
        answer = await rig.chat(stream=True, seed=at)
        assert answer.content == event("a") + DONE
        assert (await rig.timeline(answer))["generated_tokens"] == 3


# ---------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("raw", "cached", "usage", "patched"),
    [
        (b'{"prompt_tokens":5}', 3, Usage(5, None), None),
        (b'{"completion_tokens":2,"prompt_tokens":5}', None, Usage(5, 2), None),
        (b'{"prompt_tokens_details":null}', 3, Usage(), None),
        (b'{"prompt_tokens_details":{"cached_tokens":7}}', None, Usage(None, None, 7), None),
        (b'{"prompt_tokens_details":{"cached_tokens":null}}', None, Usage(), None),
        (b'{"prompt_tokens_details":{}}', None, Usage(), None),
        (
            b'{"prompt_tokens_details" : { "a" : 1.50 } ,"b":[ ]}',
            3,
            Usage(),
            b'{"prompt_tokens_details" : {"a":1.50,"cached_tokens":3} ,"b":[ ]}',
        ),
    ],
)
def test_reading_usage(raw: bytes, cached: int | None, usage: Usage, patched: bytes | None) -> None:
    assert read_usage(raw, cached) == (usage, patched)


@pytest.mark.parametrize("raw", [b"5", b"[]", b'{"prompt_tokens":"5"}', b'{"prompt_tokens":true}', b"{"])
def test_usage_that_is_none(raw: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_usage(raw, 3)


def test_splicing_takes_the_last_place() -> None:
    assert splice(b'{"a":{},"usage":{}}', b"{}", b'{"b":1}') == b'{"a":{},"usage":{"b":1}}'
