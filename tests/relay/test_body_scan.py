"""The body scanner accepts nothing that msgspec does not, and finds in it what msgspec finds."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from msgspec import Raw

from omni_proxy import call
from omni_proxy.call import CHAT, COMPLETIONS, RESPONSES

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
        shown, fields, has_parts = call._decode(path, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        return type(exc), str(exc)
    seen = msgspec.structs.asdict(shown)
    # The scanner has looked at these: a stand-in is read in their place.
    for name in ("messages", "prompt", "input"):
        seen.pop(name, None)
    return type(shown), seen, [(name, bytes(raw)) for name, raw in fields.items()], has_parts


def scanned(path: str, body: bytes) -> bool:
    of_messages = path == CHAT
    name = "messages" if of_messages else "prompt" if path == COMPLETIONS else "input"
    return _body_scan.scan(body, name, of_messages, Raw) is not None


compiled = pytest.mark.skipif(
    (call.__file__ or "").endswith(".so"), reason="a compiled module's own names cannot be replaced"
)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_ordinary_bodies_are_read_in_one_pass(path: str, body: bytes) -> None:
    assert scanned(path, body)


@compiled
def test_ordinary_bodies_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in BODIES:
        assert told(path, body) == by_msgspec(path, body, monkeypatch), body


@compiled
def test_odd_bodies_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ODD:
        assert told(CHAT, body) == by_msgspec(CHAT, body, monkeypatch), body


@compiled
def test_bodies_cut_anywhere_say_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in BODIES[:3]:
        for end in range(len(body)):
            assert told(path, body[:end]) == by_msgspec(path, body[:end], monkeypatch), body[:end]


@compiled
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


def test_small_values_are_copies_and_large_ones_views() -> None:
    body = b'{"a":1,"prompt":"' + b"x" * 2000 + b'"}'
    found = _body_scan.scan(body, "prompt", False, Raw)
    assert found is not None
    fields, begin, end, has_parts = found
    assert {name: bytes(raw) for name, raw in fields.items()} == {"a": b"1", "prompt": body[begin:end]}
    assert not has_parts


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        _body_scan.scan(bytearray(b"{}"), "prompt", False, Raw)
    with pytest.raises(TypeError):
        _body_scan.scan(b"{}", "prompt")
