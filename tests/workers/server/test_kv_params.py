"""`kv_transfer_params` both ways: what a prefill leg answers is what a decode leg accepts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from omni_proxy.workers.engine.kv_params import Bootstrap, Leg, handoff_params, meet, parse_leg
from omni_proxy.workers.engine.openai_api import ApiError
from omni_proxy.workers.engine.types import Handoff, JoinRoom, PullFrom, SamplingParams
from tests.workers.server.fake import FakeEngine, LiveServer

HANDOFF = Handoff("P0", "cmpl-1-0-ab", "127.0.0.1", 5601, (4, 2, 9), 11, 8, 30.0)
ANSWER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 2, 9]],
    "remote_engine_id": "P0",
    "remote_request_id": "cmpl-1-0-ab",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 11,
    "remote_blocks_expiry_time": 130.0,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 8,
}
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
PULL = PullFrom("P0", "cmpl-1-0-ab", "127.0.0.1", 5601, (4, 2, 9), 11)


def test_the_answer_has_the_fields_of_vllm() -> None:
    assert handoff_params(HANDOFF, now=100.0) == ANSWER


def test_the_answer_is_accepted_as_it_is() -> None:
    assert parse_leg(ANSWER).pull == PULL
    assert parse_leg({**ANSWER, "remote_block_ids": [4, 2, 9], "unknown": {}}).pull == PULL


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"x": 1}])
def test_nothing_asked_is_no_handoff(params: dict[str, Any] | None) -> None:
    assert parse_leg(params).alone


@pytest.mark.parametrize("params", [ASK, {**ASK, **NULLS}])
def test_a_prefill_leg_keeps_its_kv(params: dict[str, Any]) -> None:
    leg = parse_leg(params)
    assert leg.keep_kv
    assert leg.pull is None


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_decode": True},
        {"do_remote_prefill": "yes"},
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [["1"]]},
        {"remote_block_ids": [True]},
        {"remote_engine_id": ""},
        {"remote_request_id": 5},
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": "5601"},
        {"remote_num_tokens": None},
        {"remote_num_tokens": 0},
        {"tp_size": 2},
        {"transfer_mode": "push"},
    ],
)
def test_what_cannot_be_trusted_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_leg({**ANSWER, **change})
    assert caught.value.status == 400
    assert next(iter(change)) in caught.value.message


def prefill(http: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"prompt": "hello world", "max_tokens": 1, "kv_transfer_params": ASK, **more}
    answer: dict[str, Any] = http.post("/v1/completions", json=body, headers={"x-request-id": "r9"}).json()
    return answer


def test_a_handoff_goes_from_leg_to_leg(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    params = prefill(http)["kv_transfer_params"]
    first = engine.submitted[0]
    assert first.keep_kv
    assert params["remote_request_id"] == first.request_id
    assert params["remote_request_id"].startswith("cmpl-r9-0-")
    assert params["remote_num_tokens"] == len(first.prompt_token_ids)
    body = {"prompt": "hello world", "max_tokens": 3, "kv_transfer_params": params}
    assert http.post("/v1/completions", json=body).status_code == 200
    pull = engine.submitted[1].pull
    assert pull is not None
    assert (pull.request_id, [list(pull.block_ids)]) == (first.request_id, params["remote_block_ids"])
    assert engine.released == []


def test_a_streamed_prefill_leg_answers_in_its_last_chunk(engine: FakeEngine, http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "stream": True, "kv_transfer_params": ASK}
    text = http.post("/v1/completions", json=body).text
    assert text.count('"remote_request_id"') == 1
    assert engine.released == []


def test_a_prompt_of_another_length_is_refused(engine: FakeEngine, http: httpx.Client) -> None:
    params = prefill(http)["kv_transfer_params"]
    body = {"prompt": "hello world and more", "kv_transfer_params": params}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_transfer_params.remote_num_tokens"
    assert len(engine.submitted) == 1


def test_a_leg_that_stopped_hands_nothing_over(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    engine.script = lambda request: [0]
    answer = prefill(http)
    assert (answer["kv_transfer_params"], answer["choices"][0]["finish_reason"]) == (None, "stop")
    assert engine.leased == set()


def test_a_leg_cut_by_a_stop_string_releases_its_kv(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    engine.script = lambda request: live.tokenizer.encode("the", False)
    answer = prefill(http, stop="t")
    assert (answer["kv_transfer_params"], answer["choices"][0]["finish_reason"]) == (None, "stop")
    assert engine.released == [engine.submitted[0].request_id]
    assert engine.leased == set()


def test_a_lease_is_released_on_request(engine: FakeEngine, http: httpx.Client) -> None:
    request_id = prefill(http)["kv_transfer_params"]["remote_request_id"]
    assert engine.leased == {request_id}
    assert http.post("/omni/release", json={"request_id": request_id}).json() == {}
    assert engine.leased == set()


# -- rooms


WHERE = Bootstrap("127.0.0.1", 5601, 77)


@pytest.mark.parametrize("where", [WHERE, Bootstrap("127.0.0.1", "5601", "77"), Bootstrap("[127.0.0.1]", 5601, 77)])
def test_a_decode_leg_joins_the_room(where: Bootstrap) -> None:
    for role in ("decode", "mixed"):
        leg = meet(Leg(), where, role)
        assert leg.join == JoinRoom("127.0.0.1", 5601, 77)
        assert not leg.keep_kv


def test_a_prefill_leg_opens_the_room() -> None:
    assert meet(Leg(), WHERE, "prefill") == Leg(keep_kv=True, room=77)
    assert meet(parse_leg(ASK), Bootstrap(None, None, 77), "mixed") == Leg(keep_kv=True, room=77)


def test_without_a_room_nothing_changes_and_who_pulls_does_not_join() -> None:
    assert meet(Leg(), Bootstrap("h", 1, None), "decode").alone
    pulling = parse_leg(ANSWER)
    assert meet(pulling, WHERE, "decode") == pulling


@pytest.mark.parametrize(
    ("where", "field"),
    [
        (Bootstrap(None, 5601, 77), "bootstrap_host"),
        (Bootstrap("h", None, 77), "bootstrap_port"),
        (Bootstrap("h", 0, 77), "bootstrap_port"),
        (Bootstrap("h", 65536, 77), "bootstrap_port"),
        (Bootstrap("h", "x", 77), "bootstrap_port"),
        (Bootstrap("h", 5601, -1), "bootstrap_room"),
        (Bootstrap("h", 5601, 2**63), "bootstrap_room"),
        (Bootstrap("h", 5601, "1.5"), "bootstrap_room"),
    ],
)
def test_a_room_that_cannot_be_is_refused(where: Bootstrap, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        meet(Leg(), where, "decode")
    assert (refused.value.status, refused.value.param) == (400, field)


def test_a_prefill_leg_draws_one_token_whatever_the_body_says(http: httpx.Client, engine: FakeEngine) -> None:
    """SGLang's way: both legs get the client's body."""
    fields = {"max_tokens": 50, "min_tokens": 9, "stop": ["h"], "temperature": 1.5, "kv_transfer_params": ASK}
    answer = http.post("/v1/completions", json={"prompt": "hello", **fields, "bootstrap_room": 7})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1
    asked = engine.submitted[-1]
    assert (asked.room, asked.keep_kv, asked.sampling) == (7, True, SamplingParams(1, temperature=0.0, ignore_eos=True))


def test_a_body_with_a_room_joins_it(http: httpx.Client, engine: FakeEngine) -> None:
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 5601, "bootstrap_room": 7}
    assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **fields}).status_code == 200
    assert engine.submitted[-1].join == JoinRoom("127.0.0.1", 5601, 7)
    refused = http.post("/v1/completions", json={"prompt": "hello", **fields, "n": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
