"""What is picked from an answer: the scanner says what msgspec says, or leaves it to msgspec."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from omni_proxy.json_fields import count_of, json_of, pick, picked

NAMES = ("usage", "kv_transfer_params", "n", "a b", "list")
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"message": {"content": 'a "quoted" text with \\ and \n, h\u00e9 \U0001f600'}, "usage": 5}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
    "n": 17,
    "kv_transfer_params": None,
    "list": [1, -2.5e3, True, {}],
}
ANSWERS = [dumped.encode() for dumped in (
    json.dumps(ANSWER, separators=(",", ":"), ensure_ascii=False),
    json.dumps(ANSWER),
    " " + json.dumps(ANSWER, indent=1, ensure_ascii=False) + "\n",
)]  # fmt: skip
ODD = [
    b"", b"{", b"{}", b" { } ", b"{}x", b"[]", b"null", b'{"n":1,}', b'{"n":1 "a b":2}', b'{"n":01}', b'{"n":-1}',
    b'{"n":1.0}', b'{"n":1,"n":2}', b'{"n":1,"n":null}', b'{"\\u006e":1}', b'{"\\u006e":1,"n":2}', b'{"n":"\\ud800"}',
    b'{"n":999999999999999999}', b'{"n":9999999999999999999}', b'{"n":"\xff"}', b'{"\xff":1,"n":3}', b'{"n":tru}',
    b'{"usage":' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"n": 0 , "usage" : { "a" : [ ] } }', b'{"n":"x\x01"}',
]  # fmt: skip


def told(body: bytes, by_msgspec: bool) -> object:
    try:
        return picked(body, NAMES) if by_msgspec else pick(body, NAMES)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        return type(exc), str(exc)


@pytest.mark.parametrize("body", ANSWERS)
def test_an_answer_is_read_in_one_pass(body: bytes) -> None:
    scanner = pytest.importorskip("omni_proxy._body_scan", reason="the scanner is not built")
    assert scanner.pick(body, NAMES) == picked(body, NAMES)


def test_what_is_picked() -> None:
    usage, params, n, absent, values = pick(ANSWERS[0], NAMES)
    assert usage == b'{"prompt_tokens":200,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}'
    assert (params, n, absent, values) == (None, 17, None, b"[1,-2500.0,true,{}]")


def test_odd_answers_say_the_same_to_both() -> None:
    for body in ODD:
        assert told(body, False) == told(body, True), body


def test_answers_cut_anywhere_say_the_same_to_both() -> None:
    for body in ANSWERS:
        for end in range(len(body)):
            assert told(body[:end], False) == told(body[:end], True), body[:end]


def test_answers_with_wrong_bytes_say_the_same_to_both() -> None:
    chance, alphabet = random.Random(11), b'"\\{}[],: \n\x00\x1f\x7f\x80\xc3\xff0123eE+-.utfnda'
    accepted = 0
    for _ in range(4000):
        wrong = bytearray(chance.choice(ANSWERS))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(wrong))
            wrong[at : at + chance.randint(0, 1)] = bytes([chance.choice(alphabet)])[: chance.randint(0, 1)]
        found = told(bytes(wrong), False)
        accepted += isinstance(found, tuple) and len(found) == len(NAMES)
        assert found == told(bytes(wrong), True), bytes(wrong)
    assert 300 < accepted < 3900


def test_no_more_names_than_there_are_places_for() -> None:
    scanner = pytest.importorskip("omni_proxy._body_scan", reason="the scanner is not built")
    with pytest.raises(TypeError):
        scanner.pick(b"{}", tuple("abcdefghi"))


def test_a_count_is_a_count_and_an_object_is_none() -> None:
    assert [count_of(value) for value in (None, 5, b"-5")] == [None, 5, -5]
    for wrong in (b'"5"', b"{}", b"true", b"5.0"):
        with pytest.raises(msgspec.ValidationError):
            count_of(wrong)
    assert (json_of(None), json_of(b"{}")) == (None, b"{}")
    with pytest.raises(msgspec.ValidationError):
        json_of(5)
