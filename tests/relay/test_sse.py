"""The side copy of a stream: however it is cut, the client gets the same bytes and the gateway knows the same."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api.sse import MAX_EVENT_BYTES, StreamScan, payloads
from omni_proxy.messages import Usage
from tests.relay.scripted import event, usage_event

ENDS = (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"error":{}', '"usage":{"a":1}', "[DONE]", "data: [DONE]\n\n", "\r\n\r\n", "é€😀\u2028\x85", '\\"', "}"]
)


def content(text: str) -> bytes:
    return event(text)[:-2]


EVENTS = st.one_of(
    TEXT.map(content),
    TEXT.map(lambda t: json.dumps({"choices": [{"index": 0, "text": t}]}).encode().join([b"data: ", b""])),
    st.just(event(role="assistant", content="")[:-2]),
    st.just(event("", finish="stop")[:-2]),
    st.just(usage_event()[:-2]),
    st.just(b": comment"),
    st.just(b"event: x\ndata: {}"),
    st.just(b"data:{}"),
    st.just(b'data: {"choices":\ndata: []}'),
    st.just(b'data: {"error":{"code":400}}'),
    st.just(b"data: \xff\xfe"),
    st.just(b"data: [1,"),
)
STREAMS = st.lists(st.tuples(EVENTS, st.sampled_from(ENDS)), max_size=8).map(
    lambda parts: b"".join(text + end for text, end in parts)
)


def run(parts: list[bytes], strip: bool = False, cached: int | None = None) -> tuple[bytes, tuple[object, ...]]:
    scan = StreamScan(strip, cached)
    out = b"".join(map(scan.feed, parts)) + scan.flush()
    return out, (scan.usage, scan.done, scan.first_content, scan.failed)


@given(STREAMS, st.lists(st.integers(0, 4000), max_size=12), st.booleans(), st.sampled_from([None, 3]), st.booleans())
def test_cuts_change_nothing(stream: bytes, cuts: list[int], strip: bool, cached: int | None, ends: bool) -> None:
    if ends:
        stream += b"data: [DONE]\n\n"
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    whole = run([stream], strip, cached)
    assert run([stream[a:b] for a, b in pairwise(at)], strip, cached) == whole
    assert whole[1][1] == (ends or whole[1][0] != Usage()), "the last usage is that of a whole answer"


@given(STREAMS)
def test_byte_by_byte(stream: bytes) -> None:
    """Nothing is changed at all where nothing is asked."""
    assert run([bytes([b]) for b in stream]) == (stream, run([stream])[1])
    assert run([stream])[0] == stream


@pytest.mark.parametrize("end", ENDS)
def test_each_event_passes_when_it_is_whole(end: bytes) -> None:
    scan = StreamScan(False, None)
    whole = content("a") + end
    for byte in whole[:-1]:
        assert scan.feed(bytes([byte])) == b""
    assert scan.feed(whole[-1:]) == whole


def test_an_event_without_end_passes_in_parts_when_it_is_too_long() -> None:
    """... so that nobody fills our memory with it; what follows it is whole again."""
    scan = StreamScan(False, None)
    begin, more = b"data: " + b"x" * (MAX_EVENT_BYTES - 10), b"y" * 20
    assert scan.feed(begin) == b""
    assert scan.feed(more) == begin + more
    assert scan.mid_event
    assert scan.feed(b"z\n\n" + event("a")) == b"z\n\n" + event("a")
    assert not scan.mid_event or scan.first_content


@pytest.mark.parametrize(
    "delta",
    ['"content":"x"', '"reasoning_content":"x"', '"reasoning":"x"', '"tool_calls":[{"index":0}]', '"refusal":"no"',
     '"role":"assistant","content":"x"', '"function_call":{"name":"f"}'],
)  # fmt: skip
def test_what_counts_as_content(delta: str) -> None:
    scan = StreamScan(False, None)
    scan.feed(event(role="assistant", content=""))
    assert (scan.first_content, scan.opening) == (False, True)
    scan.feed(f'data: {{"choices":[{{"delta":{{{delta}}}}}]}}\n\n'.encode())
    assert (scan.first_content, scan.opening) == (True, False)


@pytest.mark.parametrize(
    "text",
    [b'{"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}', b'{"choices":[{"text":""}]}',
     b'{"choices":[{"delta":{}}]}', b'{"choices":[{"index":0}]}'],
)  # fmt: skip
def test_what_may_be_held_back(text: bytes) -> None:
    scan = StreamScan(False, None)
    scan.feed(b"data: " + text + b"\n\n")
    assert (scan.first_content, scan.opening) == (False, True)


@pytest.mark.parametrize(
    "text", [b": ping", b"data: {}", b'data: {"choices":[]}', b"data: [DONE]", b'data: {"error":{}}', b"data: text"]
)
def test_what_is_not_held_back(text: bytes) -> None:
    scan = StreamScan(False, None)
    scan.feed(text + b"\n\n")
    assert (scan.first_content, scan.opening) == (False, False)


@pytest.mark.parametrize(
    ("error", "status"),
    [(b'{"code":400}', 400), (b'{"code":"x"}', 500), (b'{"code":200}', 500), (b'"gone"', 500), (b"{}", 500)],
)
def test_error_events(error: bytes, status: int) -> None:
    scan = StreamScan(False, None)
    scan.feed(b'data: {"error":null}\n\n')
    assert scan.failed == 0
    scan.feed(b'data: {"error":' + error + b"}\n\n")
    assert scan.failed == status


def test_payloads_of_several_lines() -> None:
    assert payloads(b": c\nevent: x\ndata: a\r\ndata:b\nid: 1\n\n") == [b"a", b"b"]
