"""What is tried again and what is not: never what a worker may have processed, never without bound."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.relay.conftest import Start
from tests.relay.raw import chat, post
from tests.relay.scripted import (
    DONE,
    HANDOFF,
    Script,
    ScriptedWorker,
    Seen,
    decode_stream,
    event,
    prefill_answer,
    prefill_ok,
)

SLOW_PROBES = {"interval_s": 60}
"""Who stops is found out by requests, not by probes."""


def in_turn(*scripts: Script) -> Script:
    """A worker that does these one after the other, and the last of them from then on."""
    left = list(scripts)

    async def script(seen: Seen) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(seen)

    return script


def busy(body: bytes, status: int = 503) -> Script:
    async def script(seen: Seen) -> None:
        await seen.answer(status, body)

    return script


async def reset(seen: Seen) -> None:
    seen.reset()


async def role_then_reset(seen: Seen) -> None:
    await seen.open_stream()
    await seen.chunk(event(role="assistant", content=""))
    seen.writer.close()


def asked(*workers: ScriptedWorker) -> int:
    return sum(len(worker.seen) for worker in workers)


@pytest.mark.parametrize("leg", ["p", "d"])
async def test_a_refused_connection_goes_elsewhere(start: Start, leg: str) -> None:
    rig = await start({"health": SLOW_PROBES}, p0=prefill_ok, p1=prefill_ok, d0=decode_stream, d1=decode_stream)
    await rig[leg + "0"].stop()
    answers = [await rig.chat() for _ in range(6)]
    assert [a.status_code for a in answers] == [200] * 6
    attempts = [(await rig.timeline(a))["attempts"] for a in answers]
    assert sum(attempts) == 13, "one request met the dead worker, all others knew"
    for seen in rig["d1"].seen:
        assert seen.json["kv_transfer_params"] == HANDOFF
    assert asked(rig["p0"], rig["p1"]) == 6, "no prompt is computed twice because D was away"
    await rig.idle()


async def test_a_pair_with_a_dead_d_starts_over_in_another_room(start: Start) -> None:
    go_on = {"connector": "sglang", "health": SLOW_PROBES}
    rig = await start(go_on, p0=prefill_ok, d0=decode_stream, d1=decode_stream)
    await rig["d0"].stop()
    answers = [await rig.chat() for _ in range(3)]
    assert [a.status_code for a in answers] == [200] * 3
    rooms = [seen.json["bootstrap_room"] for seen in rig["p0"].seen]
    assert len(set(rooms)) == len(rooms)
    assert {seen.json["bootstrap_room"] for seen in rig["d1"].seen} <= set(rooms)
    await rig.idle()


# --------------------------------------------------------------------------------- reused sockets


async def test_a_stale_socket_is_no_failure(start: Start) -> None:
    """The worker closed an idle connection just when the request went out (faults K1)."""
    rig = await start(p0=in_turn(prefill_ok, reset, prefill_ok), d0=in_turn(decode_stream, reset, decode_stream))
    assert (await rig.chat()).status_code == 200
    answer = await rig.chat()
    assert answer.status_code == 200
    assert (await rig.timeline(answer))["attempts"] == 2
    assert asked(rig["p0"], rig["d0"]) == 6
    workers = (await rig.client.get("/omni/workers")).json()["workers"]
    assert {w["state"] for w in workers} == {"up"}
    await rig.idle()


async def test_a_new_socket_that_dies_is_a_failure(start: Start) -> None:
    rig = await start(p0=in_turn(prefill_ok, reset), p1=prefill_ok, d0=decode_stream)
    answers = []
    while len(rig["p0"].seen) < 3:
        answers.append(await rig.chat())
    assert [a.status_code for a in answers[:-1]] == [200] * (len(answers) - 1)
    assert (answers[-1].status_code, answers[-1].json()["error"]["code"]) == (502, "worker_closed")
    assert asked(rig["p1"]) == len(answers) - 2, "the prompt may have been computed: nobody else is asked"
    await rig.idle()


async def test_a_reused_socket_that_dies_late_is_a_failure(start: Start) -> None:
    """The worker had the request for longer than a stale connection takes to show."""
    rig = await start({"retries": {"max": 2}}, p0=in_turn(prefill_ok, reset), d0=decode_stream)
    rig.gateway.front.upstreams["p0"].pool.stale_s = 0.0
    assert (await rig.chat()).status_code == 200
    answer = await rig.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_closed")
    assert asked(rig["p0"]) == 2
    await rig.idle()


# -------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize("leg", ["p", "d"])
async def test_a_refusal_of_the_request_is_final(start: Start, leg: str) -> None:
    rig = await start(p0=prefill_ok, p1=prefill_ok, d0=decode_stream, d1=decode_stream)
    for status in (400, 401, 404, 413, 422, 500, 501, 502, 504):
        for name in (leg + "0", leg + "1"):
            rig[name].script = busy(b'{"error":%d}' % status, status)
        before = asked(rig[leg + "0"], rig[leg + "1"])
        answer = await rig.chat()
        assert (answer.status_code, answer.json()) == (status, {"error": status})
        assert asked(rig[leg + "0"], rig[leg + "1"]) == before + 1
    await rig.idle()


async def test_a_busy_d_sends_on_with_the_same_kv(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=in_turn(busy(b"{}"), decode_stream), d1=in_turn(busy(b"{}"), decode_stream))
    answer = await rig.chat(stream=True)
    assert answer.status_code == 200
    assert answer.content.endswith(DONE)
    assert asked(rig["p0"]) == 1
    bodies = [seen.json["kv_transfer_params"] for worker in ("d0", "d1") for seen in rig[worker].seen]
    assert bodies == [HANDOFF] * 3
    await rig.idle()


ABANDONED = b'{"error":{"message":"a rank is gone","type":"abandoned","param":null,"code":503}}'


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abandoned_answer_starts_over_from_p(start: Start, stream: bool) -> None:
    """D has pulled what P kept for it: another D with the same parameters would find nothing."""
    begun = in_turn(busy(ABANDONED), decode_stream)
    rig = await start({"retries": {"max": 1}}, p0=prefill_ok, d0=begun, d1=begun)
    answer = await rig.chat(stream=stream)
    assert answer.status_code == 200, answer.text
    assert asked(rig["p0"]) == asked(rig["d0"], rig["d1"]) == 2
    failures = [line for line in (await rig.client.get("/metrics")).text.splitlines() if "leg_failures_total{" in line]
    assert any('kind="gave_up"' in line and line.endswith(" 1.0") for line in failures)
    await rig.idle()


def abandons_after(*events: bytes) -> Script:
    """D that gives its stream up behind these events."""

    async def script(seen: Seen) -> None:
        await seen.open_stream()
        for part in (*events, b"data: " + ABANDONED + b"\n\n", DONE):
            await seen.chunk(part)
        await seen.end_stream()

    return script


async def test_a_stream_of_which_nothing_was_shown_starts_over(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=in_turn(abandons_after(event(role="assistant", content="")), decode_stream))
    answer = await rig.chat(stream=True)
    assert b"abandoned" not in answer.content
    assert answer.content.count(b'"role"') == 1
    assert answer.content.endswith(DONE)
    assert asked(rig["p0"]) == asked(rig["d0"]) == 2
    await rig.idle()


async def test_a_stream_that_was_seen_tells_its_client(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=abandons_after(event(role="assistant", content=""), event("Hel")))
    answer = await rig.chat(stream=True)
    assert answer.content.count(ABANDONED) == 1
    assert asked(rig["p0"]) == asked(rig["d0"]) == 1
    await rig.idle()


async def test_an_abandoned_prefill_goes_elsewhere(start: Start) -> None:
    begun = in_turn(busy(ABANDONED), prefill_ok)
    rig = await start({"retries": {"max": 1}}, p0=begun, p1=begun, d0=decode_stream)
    assert (await rig.chat()).status_code == 200
    assert asked(rig["p0"]) == asked(rig["p1"]) == asked(rig["d0"]) == 1
    await rig.idle()


async def test_nobody_can_go_on_with_it(start: Start) -> None:
    rig = await start({"retries": {"max": 1}}, p0=prefill_ok, d0=busy(ABANDONED), d1=busy(ABANDONED))
    answer = await rig.chat()
    assert (answer.status_code, answer.content) == (503, ABANDONED)
    await rig.idle()


async def test_the_last_refusal_wins_and_the_tries_are_bounded(start: Start) -> None:
    """Faults K7: both D say no."""
    order: list[bytes] = []

    async def no(seen: Seen) -> None:
        order.append(b'{"try":%d}' % len(order))
        await seen.answer(503, order[-1])

    rig = await start({"retries": {"max": 2}}, p0=prefill_ok, d0=no, d1=no)
    answer = await rig.chat(stream=True)
    assert len(order) == 3
    assert (answer.status_code, answer.content) == (503, order[-1])
    rig["p0"].script = no
    answer = await rig.chat()
    assert len(order) == 6
    assert (answer.status_code, answer.content) == (503, order[-1])
    await rig.idle()


async def test_retries_can_be_switched_off(start: Start) -> None:
    rig = await start({"retries": {"max": 0}}, p0=prefill_ok, d0=busy(b"{}"), d1=busy(b"{}"))
    assert (await rig.chat()).status_code == 503
    assert asked(rig["d0"], rig["d1"]) == 1
    await rig.idle()


# ------------------------------------------------------------------------------- D before its answer


@pytest.mark.parametrize("broken", [reset, role_then_reset])
async def test_a_d_that_dies_before_it_has_said_anything(start: Start, broken: Script) -> None:
    """The prompt is computed anew, the first P's blocks are given back, and the client sees one answer."""

    async def prefill(seen: Seen) -> None:
        params = {**HANDOFF, "remote_request_id": f"r-{len(rig['p0'].seen)}"}
        await seen.answer(200, prefill_answer(params=params))

    rig = await start({"connector": "omni"}, p0=prefill, d0=in_turn(broken, decode_stream))
    answer = await rig.chat(stream=True)
    assert answer.status_code == 200
    assert answer.text.count('"role"') == 1
    assert answer.content.endswith(DONE)
    assert [seen.json["kv_transfer_params"]["remote_request_id"] for seen in rig["d0"].seen] == ["r-1", "r-3"]
    release = rig["p0"].seen[1]
    assert (release.path, release.json) == ("/omni/release", {"request_id": "r-1"})
    timeline = await rig.timeline(answer)
    assert (timeline["outcome"], timeline["attempts"]) == ("completed", 4)
    await rig.idle()


async def test_a_d_that_dies_after_its_first_token_is_not_replaced(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event("Hel"))
        seen.writer.close()

    rig = await start(p0=prefill_ok, d0=decode, d1=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    answer = await client.response()
    assert not answer.clean
    assert asked(rig["d0"], rig["d1"]) == 1
    await rig.idle()


async def test_dying_again_and_again_is_bounded(start: Start) -> None:
    rig = await start({"retries": {"max": 2}}, p0=prefill_ok, d0=reset)
    answer = await rig.chat(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_closed")
    assert asked(rig["d0"]) == 3
    await rig.idle()


# ----------------------------------------------------------------------------------- who is avoided


@pytest.mark.parametrize("broken", [reset, busy(b"{}", 500)])
async def test_a_worker_that_fails_at_once_attracts_nobody(start: Start, broken: Script) -> None:
    """It is the least loaded by far; a gateway that looks at nothing else sends everything there."""
    rig = await start(p0=broken, p1=prefill_ok, d0=decode_stream)
    statuses = [(await rig.chat()).status_code for _ in range(20)]
    assert len(rig["p0"].seen) == 1
    assert statuses.count(200) == 19
    workers = (await rig.client.get("/omni/workers")).json()["workers"]
    assert {w["name"]: w["state"] for w in workers} == {"d0": "up", "p0": "ejected", "p1": "up"}
    assert json.dumps(workers).count("127.0.0.1") == 0
    await rig.idle()


async def test_an_ejected_worker_gets_another_chance(start: Start) -> None:
    rig = await start(
        {"health": {"fail_timeout_s": 0.1}}, p0=in_turn(reset, prefill_ok), p1=prefill_ok, d0=decode_stream
    )
    async with asyncio.timeout(5):
        while len(rig["p0"].seen) < 2:
            await rig.chat()
    assert (await rig.chat()).status_code == 200
    await rig.idle()
