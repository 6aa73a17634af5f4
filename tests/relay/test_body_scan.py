"""The body scanner accepts nothing that msgspec does not, and reads in it what msgspec reads."""

from __future__ import annotations

import json
import random

import pytest
from msgspec import Raw

from omni_proxy import call
from omni_proxy.call import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from omni_proxy.calls import Call
from omni_proxy.errors import Rejected

_body_scan = pytest.importorskip("omni_proxy._body_scan", reason="the scanner is not built")

MESSAGES_OF_TWO = [
    {"role": "system", "content": 'Say "yes" or no.\n' * 9},
    {"role": "user", "content": "h\u00e9 \U0001f600 \\ /", "name": "x"},
]
ORDINARY = [
    (CHAT, {"model": "m", "messages": MESSAGES_OF_TWO, "max_tokens": 2, "stream": True, "x": [1, {"a": None}]}),
    (CHAT, {"messages": [{"content": [{"type": "text", "text": "x"}], "role": "user"}], "model": "m"}),
    (CHAT, {"model": "m", "temperature": -0.5e-3, "top_k": 0, "tools": [], "messages": [{"role": "user"}]}),
    (COMPLETIONS, {"prompt": "a" * 700, "model": "m", "stop": ["x"], "n": 1, "logit_bias": {"1": 2.5}}),
    (RESPONSES, {"input": "h\u00e9", "model": "m", "max_output_tokens": 5, "store": False, "deep": [[[[]]]]}),
]
BODIES = [(path, dumped.encode()) for path, body in ORDINARY for dumped in (
    json.dumps(body),
    json.dumps(body, ensure_ascii=False, separators=(",", ":")),
    "\t" + json.dumps(body, ensure_ascii=False, indent=3) + "\r\n",
)]  # fmt: skip
ODD = [
    b"", b"{", b"{}", b"[]", b"null", b'{"model":"m"}', b'{"messages":[]}', b'{"messages":[{}]}',
    b'{"messages":[{"role":1}]}', b'{"messages":[{"role":"a","role":1}]}', b'{"messages":[{"role":"a"}],}',
    b'{"model":"m","messages":[{"role":"a","content":[],"content":"x"}]}',
    b'{"model":"m","messages":[{"role":"a"}],"messages":[{"role":"a","content":[]}]}',
    b'{"model":"m","messages":[{"r\\u006fle":"a","role":"b"}]}',
    b'{"model":"m","mess\\u0061ges":1,"messages":[{"role":"b"}]}',
    b'{"model":"m","messages":[{"role":"a"}],"x":"\\ud800"}',
    b'{"model":"m","messages":[{"role":"a"}],"x":"\\ud800\\ud800"}',
    b'{"model":"m","messages":[{"role":"a"}],"x":"\\u12g4"}', b'{"model":"m","messages":[{"role":"a"}],"x":"\x1f"}',
    b'{"model":"m","messages":[{"role":"a"}],"x":"\xff"}', b'{"model":"m","messages":[{"role":"a"}],"\xff":1}',
    b'{"model":"m","messages":[{"role":"a"}],"x":01}', b'{"model":"m","messages":[{"role":"a"}],"x":1.}',
    b'{"model":"m","messages":[{"role":"a"}],"x":-}', b'{"model":"m","messages":[{"role":"a"}],"x":nul}',
    b'{"model":"m","messages":[{"role":"a"}],"x":1e400}', b'{"model":"m","messages":[{"role":"a"}]} x',
    b'{"model":"m","messages":[{"role":"a"}],"x":' + b"[" * 9000 + b"]" * 9000 + b"}",
]  # fmt: skip


def by_msgspec(path: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> object:
    with monkeypatch.context() as without:
        without.setattr(call, "_scan", None)
        return told(path, body)


def told(path: str, body: bytes) -> object:
    """All that is taken from a body, or what is wrong with it."""
    try:
        read = call.parse_call(path, body)
    except Rejected as exc:
        return exc.code, exc.message, exc.param
    seen = {name: getattr(read, name) for name in Call.__slots__ if name not in ("_fields", "places")}
    asked = ["model", "messages", "x", "k\u00e9y", "", "stream_options", "y" * 41]
    has = [read.has(name) for name in asked]
    assert has == [name in read.fields for name in asked]
    assert has == [read.has(name) for name in asked]
    return seen, [(name, bytes(raw)) for name, raw in read.fields.items()]


def scanned(path: str, body: bytes) -> bool:
    return _body_scan.scan(body, call._NAMES[path], path in (CHAT, MESSAGES)) is not None


def read_at_once(path: str, body: bytes) -> bool:
    """Does msgspec never see it?"""
    found = _body_scan.scan(body, call._NAMES[path], path in (CHAT, MESSAGES))
    return found is not None and not found[0] & call._READ


COMPILED = (call.__file__ or "").endswith(".so")
not_compiled = pytest.mark.skipif(COMPILED, reason="a compiled module's own names cannot be replaced")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_ordinary_bodies_are_read_in_one_pass(path: str, body: bytes) -> None:
    assert scanned(path, body)


@not_compiled
def test_ordinary_bodies_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in BODIES:
        assert told(path, body) == by_msgspec(path, body, monkeypatch), body


@not_compiled
def test_odd_bodies_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ODD:
        assert told(CHAT, body) == by_msgspec(CHAT, body, monkeypatch), body


@not_compiled
def test_bodies_cut_anywhere_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in BODIES[:3]:
        for end in range(len(body)):
            assert told(path, body[:end]) == by_msgspec(path, body[:end], monkeypatch), body[:end]


@not_compiled
def test_bodies_with_wrong_bytes_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, alphabet = random.Random(5), b'"\\{}[],: \n\x00\x1f\x7f\x80\xc3\xff0123eE+-.utfnda'
    accepted = 0
    for _ in range(3000):
        path, body = chance.choice(BODIES)
        wrong = bytearray(body)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(wrong))
            wrong[at : at + chance.randint(0, 1)] = bytes([chance.choice(alphabet)])[: chance.randint(0, 1)]
        accepted += scanned(path, bytes(wrong))
        assert told(path, bytes(wrong)) == by_msgspec(path, bytes(wrong), monkeypatch), bytes(wrong)
    assert 300 < accepted < 2900


@pytest.mark.parametrize(
    "more",
    [
        {}, {"max_tokens": 1}, {"max_tokens": 10**17}, {"max_tokens": None}, {"max_completion_tokens": 8},
        {"stream": False}, {"stream": None}, {"stream": True, "stream_options": {"include_usage": True}},
        {"stream_options": {"x": [1], "include_usage": False}}, {"stream_options": {}}, {"stream_options": None},
        {"temperature": 0}, {"temperature": 0.75, "top_p": 1.0}, {"top_p": None}, {"stop": "\n"}, {"stop": ["\n", "x"]},
        {"stop": []}, {"n": 1, "best_of": None}, {"echo": False}, {"use_beam_search": None}, {"tools": [{}]},
        {"kv_transfer_params": {}}, {"rid": "x"}, {"reasoning_effort": "low"}, {"extra_body": {"a": 1}},
    ],
)  # fmt: skip
def test_the_usual_is_read_at_once(more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES_OF_TWO, **more}).encode()
    assert read_at_once(CHAT, body)
    if not COMPILED:
        assert told(CHAT, body) == by_msgspec(CHAT, body, monkeypatch)


UNUSUAL = [
    b'"max_tokens":0', b'"max_tokens":-1', b'"max_tokens":1.0', b'"max_tokens":1e2', b'"max_tokens":"1"',
    b'"max_tokens":1234567890123456789', b'"max_tokens":01', b'"max_tokens":9,"max_tokens":8', b'"max_tokens":true',
    b'"max_completion_tokens":0', b'"stream":1', b'"stream":"true"', b'"stream":true,"stream":false',
    b'"temperature":-0', b'"temperature":1e0', b'"temperature":-1', b'"temperature":"1"', b'"top_p":[]',
    b'"stop":1', b'"stop":[1]', b'"stop":["a",null]', b'"stop":{}', b'"n":2', b'"n":0', b'"n":1.0',
    b'"best_of":3,"n":2', b'"echo":true', b'"use_beam_search":true', b'"priority":5', b'"priority":"high"',
    b'"ttft_target_s":0.5', b'"ttft_target_s":0', b'"prompt_logprobs":1', b'"logprob_start_len":-1',
    b'"logprob_start_len":0',
    b'"stream_options":1', b'"stream_options":[]', b'"stream_options":{"include_usage":1}',
    b'"stream_options":{"include_usage":true,"include_usage":false},"stream":true', b'"model":"\\u006d"', b'"model":""',
    b'"model":1', b'"model":null', b'"model":"a","model":"b"', b'"x":1,"x":2', b'"max\\u005ftokens":1',
]  # fmt: skip


@not_compiled
def test_the_unusual_says_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for more in UNUSUAL:
        for body in (
            b'{"model":"m",' + more + b',"messages":[{"role":"user","content":"x"}]}',
            b'{"messages":[{"role":"user","content":"x"}],"model":"m",\n' + more + b" }",
            b'{"messages":[{"role":"user","content":"x"}],' + more + b"}",
        ):
            assert told(CHAT, body) == by_msgspec(CHAT, body, monkeypatch), body
            assert not read_at_once(CHAT, body), body


def values(chance: random.Random) -> object:
    """Something to stand as a field's value, right or wrong."""
    return chance.choice(
        [None, True, False, 0, 1, 2, -1, 1.0, 0.5, 10**20, "", "x", "\n", "h\u00e9", [], ["x"], [1], [[1]], {},
         {"include_usage": chance.choice([True, False, None, 1])}, [{"role": "user"}], [{"role": 1}], {"rid": 1}]
    )  # fmt: skip


@not_compiled
def test_any_fields_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of all endpoints, and of none, with right and wrong values."""
    chance, at_once = random.Random(11), 0
    for _ in range(6000):
        path = chance.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
        names = [*call._codes(path), "tools", "x" * 40, "y" * 41, "k\u00e9y"]
        fields: dict[str, object] = {"model": "m", call._PROMPTS[path]: "hi"}
        if path in (CHAT, MESSAGES):
            fields["messages"] = [{"role": "user", "content": chance.choice(["x", [], None])}]
        fields |= {name: values(chance) for name in chance.sample(names, chance.randint(0, 3))}
        body = json.dumps(dict(chance.sample(sorted(fields.items()), len(fields))), ensure_ascii=chance.random() < 0.5)
        at_once += read_at_once(path, body.encode())
        assert told(path, body.encode()) == by_msgspec(path, body.encode(), monkeypatch), body
    assert 1500 < at_once < 5000


def test_bodies_with_very_many_fields_are_left_to_msgspec() -> None:
    for count, at_once in ((62, True), (63, False)):
        fields = {"model": "m", "prompt": "x", **{f"x{n}": n for n in range(count)}}
        body = json.dumps(fields).encode()
        assert read_at_once(COMPLETIONS, body) is at_once
        assert {k: json.loads(bytes(v)) for k, v in call.parse_call(COMPLETIONS, body).fields.items()} == fields


def test_small_values_are_copies_and_large_ones_views() -> None:
    body = b'{"a":1,"prompt":"' + b"x" * 2000 + b'","model":"m"}'
    found = _body_scan.scan(body, call._NAMES[COMPLETIONS], False)
    assert found is not None
    _, places, begin, end, model, cap = found
    assert (model, cap) == ("m", None)
    fields = _body_scan.fields(body, places, Raw)
    assert {name: bytes(raw) for name, raw in fields.items()} == {"a": b"1", "prompt": body[begin:end], "model": b'"m"'}


def test_wrong_arguments_are_refused() -> None:
    names = _body_scan.names({"prompt": 10})
    for wrong in ((bytearray(b"{}"), names, False), (b"{}", "prompt", False), (b"{}", names)):
        with pytest.raises(TypeError):
            _body_scan.scan(*wrong)
    for codes in ({"x" * 41: 1}, {"": 1}):
        with pytest.raises(ValueError, match="too long"):
            _body_scan.names(codes)
    with pytest.raises(TypeError):
        _body_scan.names({str(n): 1 for n in range(200)})
    with pytest.raises(TypeError):
        _body_scan.fields(b"{}", "", Raw)
