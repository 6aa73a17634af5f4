"""Faults 1.1: what of a client's body each leg gets, for every connector that hands over. No sockets."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from omni_proxy.api.bodies import forced_usage
from omni_proxy.call import (
    CHAT,
    COMPLETIONS,
    GENERATING,
    INTERNAL_FIELDS,
    MESSAGES,
    RESPONSES,
    append_fields,
    parse_call,
)
from omni_proxy.errors import Rejected
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors import matrix
from omni_proxy.workers.connectors.answers import GarbageAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.fields import DECODE, ONE_TOKEN, SAME_BODY, LegFields
from omni_proxy.workers.connectors.pair import Pair, Peer
from omni_proxy.workers.connectors.registry import CONNECTORS

PAIR = Pair(b"id", 2**63 - 1, Peer("p0", "10.0.0.1", 8000, 8998))
ASKED = Raw(b"{}")
"""What D says where it goes first; others ignore it."""
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}
BESIDE = [CONNECTORS["sglang"]]
"""P makes the first token of the answer."""
FIRST = [c for c in CONNECTORS.values() if c not in BESIDE and c.modes != (Mode.AGGREGATED,)]
"""P makes a token that nobody sees."""
first = pytest.mark.parametrize("connector", FIRST, ids=lambda c: c.name)
both = pytest.mark.parametrize("connector", [*FIRST, *BESIDE], ids=lambda c: c.name)
endpoint = pytest.mark.parametrize("path", sorted(GENERATING))


def raw(path: str, **fields: Any) -> bytes:
    return json.dumps(BODIES[path] | fields).encode()


def p_body(connector: Connector, path: str, **fields: Any) -> Any:
    return json.loads(connector.prefill_body(parse_call(path, raw(path, **fields)), PAIR, ASKED))


def d_body(path: str, **fields: Any) -> Any:
    return json.loads(append_fields(parse_call(path, raw(path, **fields)), [("kv_transfer_params", b"{}")]))


@first
@endpoint
def test_r1_a_cap_that_the_client_left_out_stays_out_on_d(connector: Connector, path: str) -> None:
    cap = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert p_body(connector, path)[cap] == 1
    assert d_body(path) == BODIES[path] | {"kv_transfer_params": {}}


@first
@endpoint
def test_r2_every_cap_is_one_and_ps_own_params_never_reach_d(connector: Connector, path: str) -> None:
    caps = {"max_tokens": 256, "max_completion_tokens": 256, "max_output_tokens": 256}
    asked = p_body(connector, path, **caps)
    assert {asked[name] for name in caps if name in asked} == {1} or path in (RESPONSES, MESSAGES)
    assert asked["max_output_tokens" if path == RESPONSES else "max_tokens"] == 1
    try:
        handoff = connector.read_prefill(b'{"kv_transfer_params":{"do_remote_decode":true}}').handoff
    except GarbageAnswer:
        handoff = None
    assert handoff is None or b"do_remote_decode" not in bytes(handoff)


@both
@endpoint
def test_r3_r5_p_is_never_asked_to_stream(connector: Connector, path: str) -> None:
    asked = p_body(connector, path, stream=True, stream_options={"include_usage": True})
    assert asked["stream"] is False
    assert "stream_options" not in asked


@first
@endpoint
def test_r4_no_minimum_above_the_cap(connector: Connector, path: str) -> None:
    minimum = {"min_tokens": 100, "min_completion_tokens": 100}
    asked = p_body(connector, path, max_tokens=500, **minimum)
    assert all(asked.get(name, 0) <= 1 for name in minimum)
    assert d_body(path, **minimum).items() >= minimum.items()


@first
@endpoint
def test_r6_nothing_lets_p_end_by_itself(connector: Connector, path: str) -> None:
    stops = {"stop": ["\n"], "stop_token_ids": [2], "stop_sequences": ["x"], "ignore_eos": False}
    asked = p_body(connector, path, **stops)
    assert asked["ignore_eos"] is (path != MESSAGES), "messages have no such field"
    assert not {"stop", "stop_token_ids", "stop_sequences"} & asked.keys()
    assert d_body(path, **stops).items() >= stops.items()
    handoff = connector.read_prefill(b'{"kv_transfer_params":null}').handoff
    told = [] if handoff is None else connector.decode_fields(parse_call(path, raw(path)), PAIR, handoff)
    assert not told, "what P did not say is not told to D"


@first
def test_r7_p_makes_one_sample(connector: Connector) -> None:
    asked = p_body(connector, COMPLETIONS, n=1, best_of=1)
    assert not {"n", "best_of"} & asked.keys()
    assert parse_call(COMPLETIONS, raw(COMPLETIONS, n=4)).whole


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_r8_several_prompts_are_not_one(prompt: Any) -> None:
    call = parse_call(COMPLETIONS, raw(COMPLETIONS, prompt=prompt))
    assert (call.whole, call.whole_because, call.parts) == (True, "prompt", 2)
    assert not parse_call(COMPLETIONS, raw(COMPLETIONS, prompt=prompt[:1])).whole


def test_r10_what_is_said_of_the_prompt_is_one_workers() -> None:
    for extra in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 1}):
        call = parse_call(COMPLETIONS, raw(COMPLETIONS, **extra))
        assert (call.whole, call.parts) == (True, 1)
    assert parse_call(CHAT, raw(CHAT, echo=True)).whole is False, "there it is about the last message"


@both
@endpoint
def test_r11_r12_what_nobody_knows_keeps_bytes_and_order(connector: Connector, path: str) -> None:
    odd = b',"x_vendor":{"z":[1,2.50],"a":9223372036854775808},"chat_template_kwargs":{"enable_thinking":false}}'
    body = raw(path)[:-1] + odd
    call = parse_call(path, body)
    assert odd[:-1] in connector.prefill_body(call, PAIR, ASKED)
    assert append_fields(call, [("kv_transfer_params", b"1")]) == body[:-1] + b',"kv_transfer_params":1}'


@both
@endpoint
def test_no_field_comes_twice(connector: Connector, path: str) -> None:
    own = {"max_tokens": 9, "stream": True, "ignore_eos": False, "min_tokens": 1, "kv_transfer_params": {}, "rid": "x"}
    names: list[str] = []
    body = connector.prefill_body(parse_call(path, raw(path, **own)), PAIR, ASKED)
    json.loads(body, object_pairs_hook=lambda pairs: names.append(*[[name for name, _ in pairs]]))  # type: ignore[arg-type]
    assert len(set(names[-1])) == len(names[-1])


@pytest.mark.parametrize("rules", [ONE_TOKEN, SAME_BODY], ids=["one token", "same body"])
@endpoint
def test_the_scanner_makes_the_body_that_python_makes(rules: Mapping[str, LegFields], path: str) -> None:
    chance, at_all = random.Random(3), 0
    known = sorted({*rules[path].drop, *rules[path].cap, *rules[path].force} - INTERNAL_FIELDS - {"stop"})
    for _ in range(200):
        picked = chance.sample([*known, "x", "h\u00e9", "seed", "stop", "tools"], chance.randrange(6))
        values = [chance.choice([b"1", b"true", b'"a,\\"b"', b"[1, {}]", b'{"a":[]}', b"null"]) for _ in picked]
        blank = chance.choice([b"", b" ", b"\n\t"])
        pairs = [*BODIES[path].items(), *zip(picked, values, strict=True)]
        chance.shuffle(pairs)
        members = [
            b"%b%b%b:%b%b%b" % (blank, json.dumps(name, ensure_ascii=False).encode(), blank, blank, value, blank)
            for name, value in ((n, v if isinstance(v, bytes) else json.dumps(v).encode()) for n, v in pairs)
        ]
        body = b"{" + b",".join(members) + b"}"
        try:
            call = parse_call(path, body)
        except Rejected:
            continue
        at_all += 1
        for added in ([], [("kv_transfer_params", b"{}")], [("x", b"5"), ("rid", b'"r"')]):
            made = rules[path].body(call, added)
            assert made == rules[path].joined(call, added), body
            json.loads(made)
    assert at_all > 50


@both
def test_r15_tools_are_the_same_on_both_legs(connector: Connector) -> None:
    """Also with `tool_choice: required`: the prompt is rendered from it."""
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    assert p_body(connector, CHAT, **tools).items() >= tools.items()


@pytest.mark.parametrize("path", sorted(GENERATING))
def test_r17_what_is_no_body_is_refused(path: str) -> None:
    for body in (
        b'{"model":',
        b"[]",
        b"null",
        b"",
        b'{"model":"m","messages":"x","prompt":1,"input":1}',
        b'{"a":"\xff"}',
    ):
        with pytest.raises(Rejected):
            parse_call(path, body)


@both
@endpoint
def test_internal_fields_never_come_from_a_client(connector: Connector, path: str) -> None:
    mark = dict.fromkeys(INTERNAL_FIELDS, 424242)
    call = parse_call(path, raw(path, **mark))
    assert b"424242" not in connector.prefill_body(call, PAIR, ASKED)
    assert b"424242" not in append_fields(call, connector.decode_fields(call, PAIR, b"{}"))


@pytest.mark.parametrize("connector", BESIDE, ids=lambda c: c.name)
@endpoint
def test_beside_d_the_answers_shape_is_the_same(connector: Connector, path: str) -> None:
    """P makes the first token of the answer: what shapes it must stay."""
    shapes = {"stop": ["x"], "min_tokens": 2, "response_format": {"type": "json_object"}, "logprobs": True}
    asked = p_body(connector, path, **shapes, max_tokens=77)
    assert asked.items() >= (shapes | {"max_tokens": 77}).items()


@first
@endpoint
def test_usage_of_p_in_either_wording(connector: Connector, path: str) -> None:
    said = b'{"usage":{"%s_tokens":10,"%s_tokens_details":{"cached_tokens":3}},"kv_transfer_params":null}'
    for word in (b"prompt", b"input"):
        usage, _ = read_usage_and_params(said % (word, word))
        assert (usage.prompt_tokens, usage.cached_tokens) == (10, 3)


def test_the_tables_have_every_endpoint() -> None:
    assert set(ONE_TOKEN) == set(SAME_BODY) == GENERATING
    for rules in (*ONE_TOKEN.values(), *SAME_BODY.values(), DECODE):
        assert rules.drop >= INTERNAL_FIELDS


def test_the_document_is_current() -> None:
    document = (Path(__file__).parent.parent.parent / "docs" / "endpoints.md").read_text(encoding="utf-8")
    assert matrix.features() in document
    assert document == matrix.written(document), "python -m omni_proxy.workers.connectors.matrix docs/endpoints.md"


def test_nobody_makes_the_fields_of_an_ordinary_stream() -> None:
    pytest.importorskip("omni_proxy._body_scan", reason="the scanner is not built")
    call = parse_call(CHAT, raw(CHAT, stream=True, max_tokens=5))
    ONE_TOKEN[CHAT].body(call)
    body = append_fields(call, [("kv_transfer_params", b"{}"), forced_usage(call)])
    assert call._fields is None
    assert json.loads(body)["stream_options"] == {"include_usage": True}
    said = parse_call(CHAT, raw(CHAT, stream=True, stream_options={"x": 1}))
    assert json.loads(append_fields(said, [forced_usage(said)]))["stream_options"] == {"x": 1, "include_usage": True}
