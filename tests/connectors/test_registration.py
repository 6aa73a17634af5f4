"""Workers that are asked what they are, those that are refused, and data-parallel ranks: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from omni_proxy.apc.keys import block_keys
from omni_proxy.config import ConfigError, Worker, parse
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.kv_sources import by_member, sources_of
from tests.connectors.conftest import Begin, Pair
from tests.connectors.protocols import PROTOCOLS
from tests.relay.conftest import FAST, Rig, running
from tests.relay.scripted import HANDOFF, Script, ScriptedWorker, Seen, decode_answer, decode_stream, prefill_answer
from tests.workers.test_facts import SGLANG, VLLM_METRICS

Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve({"p0": {…}, …}, gets={"p0": {path: answer}})`: a gateway before workers that say what they are."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            configs: dict[str, dict[str, Any]],
            gets: dict[str, dict[str, Any]] | None = None,
            scripts: dict[str, Script] | None = None,
            **config: Any,
        ) -> Rig:
            workers = {}
            for name in configs:
                workers[name] = worker = ScriptedWorker((scripts or {}).get(name, decode_stream))
                for path, told in (gets or {}).get(name, {}).items():
                    worker.gets[path] = told if isinstance(told, bytes) else json.dumps(told).encode()
                await worker.start()
                stack.push_async_callback(worker.stop)
            roles = {"p": "prefill", "d": "decode", "m": "mixed"}
            listed = [
                {"name": name, "url": f"http://127.0.0.1:{workers[name].port}", "role": roles[name[0]], **more}
                for name, more in configs.items()
            ]
            return await stack.enter_async_context(
                running(parse({"workers": listed, "health": FAST, **config}, "test"), workers)
            )

        yield start


async def shown(rig: Rig) -> dict[str, Any]:
    """The workers as the gateway shows them, by name."""
    return {w["name"]: w for w in (await rig.client.get("/omni/workers")).json()["workers"]}


async def until(rig: Rig, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while not good(workers := await shown(rig)):
            await asyncio.sleep(0.01)
    return workers


async def test_workers_are_asked_what_they_are(serve: Serve) -> None:
    sglang = {"/get_server_info": SGLANG | {"dp_size": 1}}
    rig = await serve(
        {"p0": {"connector": "auto"}, "p1": {}, "m0": {}, "m1": {"connector": "auto"}},
        {
            "p0": sglang,
            "p1": {
                "/version": {"version": "0.32.0"},
                "/metrics": VLLM_METRICS.replace('engine="1"', 'engine="0"').encode(),
            },
            "m1": {"/props": {"default_generation_settings": {}, "build_info": "b99"}},
        },
    )
    workers = await until(rig, lambda found: all(w["state"] == "up" for w in found.values()) and len(found) == 4)
    assert {name: w["connector"] for name, w in workers.items()} == {
        "p0": "sglang",
        "p1": "vllm-nixl",
        "m0": "aggregated",
        "m1": "aggregated",
    }
    assert [workers[name]["engine"] for name in ("p0", "p1", "m0", "m1")] == [
        "sglang 0.5.23",
        "vllm 0.32.0",
        None,
        "llama.cpp b99",
    ]
    assert (workers["p0"]["block_tokens"], workers["p0"]["kv_capacity_tokens"]) == (16, 16384)
    assert (workers["p1"]["block_tokens"], workers["p1"]["kv_capacity_tokens"]) == (128, 128 * 341)
    peer = rig.gateway.front.upstreams["p0"].peer
    assert peer.bootstrap_port == 8997


async def test_one_that_does_not_say_is_refused_until_it_does(serve: Serve) -> None:
    rig = await serve(
        {"p0": {"connector": "auto"}}, {"p0": {"/version": {"version": "1"}}}, limits={"no_worker_timeout_s": 0.1}
    )
    workers = await until(rig, lambda found: "refused" in (found["p0"]["reason"] or ""))
    assert workers["p0"]["state"] == "down"
    assert workers["p0"]["reason"] == (
        "refused: the engine does not say how it hands KV over: name its connector in the config"
    )
    assert workers["p0"]["connector"] is None
    refused = await rig.chat()
    assert refused.status_code == 503
    assert "name its connector" in refused.json()["error"]["message"]
    rig["p0"].gets["/get_server_info"] = json.dumps(SGLANG | {"dp_size": 1}).encode()
    await until(rig, lambda found: found["p0"]["state"] == "up" and found["p0"]["connector"] == "sglang")


@pytest.mark.parametrize(
    ("config", "gets", "reason"),
    [
        ({"connector": "vllm-nixl"}, {"/get_server_info": SGLANG}, "sglang 0.5.23 does not speak vllm-nixl"),
        (
            {"connector": "sglang"},
            {"/get_server_info": SGLANG | {"disaggregation_mode": "decode"}},
            "it was started for decode, its role here is prefill",
        ),
        ({"connector": "vllm-p2p-nccl"}, {}, "the address of its KV connector is not known"),
        ({"connector": "vllm-mooncake", "bootstrap_port": 1}, {}, "its bootstrap server does not say its engine id"),
    ],
)
async def test_what_does_not_fit_is_refused(
    serve: Serve, config: dict[str, Any], gets: dict[str, Any], reason: str
) -> None:
    rig = await serve({"p0": config}, {"p0": gets})
    workers = await until(rig, lambda found: "refused" in (found["p0"]["reason"] or ""))
    assert (workers["p0"]["state"], reason in workers["p0"]["reason"]) == ("down", True)


async def test_a_pair_that_cannot_exchange_kv(serve: Serve) -> None:
    """Who comes second is refused, and taken in when the first has gone."""
    other = VLLM_METRICS.replace('"128"', '"16"').replace('engine="1"', 'engine="0"').encode()
    same = VLLM_METRICS.replace('engine="1"', 'engine="0"').encode()
    rig = await serve(
        {name: {"connector": "vllm-nixl"} for name in ("p0", "d0", "d1")},
        {
            name: {"/version": {"version": "1"}, "/metrics": said}
            for name, said in (("p0", same), ("d0", other), ("d1", same))
        },
    )
    workers = await until(rig, lambda found: sum("refused" in (w["reason"] or "") for w in found.values()) >= 1)
    odd = next(w for w in workers.values() if "refused" in (w["reason"] or ""))
    assert "it cannot exchange KV with" in odd["reason"]
    assert "block size" in odd["reason"]
    if odd["name"] == "d0":
        assert odd["reason"].endswith("p0: block size 16, not 128")
        rig["p0"].healthy = False
        await until(rig, lambda found: found["d0"]["state"] == "up" and found["p0"]["state"] == "down")


async def test_two_groups_have_nothing_to_exchange(serve: Serve) -> None:
    metrics = VLLM_METRICS.replace('engine="1"', 'engine="0"')
    rig = await serve(
        {"p0": {"group": "a"}, "d0": {"group": "b"}, "d1": {"group": "a", "checks": False}},
        {
            "p0": {"/version": {"version": "1"}, "/metrics": metrics.encode()},
            "d0": {"/version": {"version": "1"}, "/metrics": metrics.replace('"128"', '"16"').encode()},
            "d1": {"/version": {"version": "1"}, "/metrics": metrics.replace('"128"', '"16"').encode()},
        },
    )
    await until(rig, lambda found: all(w["state"] == "up" for w in found.values()) and len(found) == 3)


async def test_a_restarted_prefill_is_known_by_its_new_name(begin: Begin) -> None:
    """Mooncake's engine id changes with every start, also with one that no probe has noticed."""
    pair: Pair = await begin(PROTOCOLS["vllm-mooncake-parallel"])
    pair.bootstrap.gets["/query"] = b'{"0":{"engine_id":"P9"}}'
    async with asyncio.timeout(5):
        while pair.rig.gateway.front.upstreams["p0"].peer.engine_id != "P9":
            await asyncio.sleep(0.01)
    assert (await pair.rig.chat()).status_code == 200
    assert pair.rig["d0"].seen[0].json["kv_transfer_params"]["remote_engine_id"] == "P9"


# ------------------------------------------------------------------------ data-parallel ranks


async def hand_over(seen: Seen) -> None:
    await seen.answer(200, prefill_answer(params=HANDOFF))


async def slow_hand_over(seen: Seen) -> None:
    await asyncio.sleep(0.1)
    await hand_over(seen)


async def test_ranks_are_members_of_their_own(serve: Serve) -> None:
    """Load goes to the ranks in turn; each leg says its rank in the header."""
    rig = await serve(
        {"p0": {"connector": "vllm-nixl", "dp_size": 2}, "d0": {"connector": "vllm-nixl", "dp_size": 4, "max_seqs": 1}},
        scripts={"p0": slow_hand_over},
    )
    workers = await until(rig, lambda found: all(w["state"] == "up" for w in found.values()))
    assert list(workers) == ["d0@0", "d0@1", "d0@2", "d0@3", "p0@0", "p0@1"]
    assert {(w["endpoint"], w["max_sequences"]) for w in workers.values()} == {("d0", 1), ("p0", 32)}
    answers = await asyncio.gather(*(rig.chat() for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    ranks = {n: Counter(seen.headers["x-data-parallel-rank"] for seen in rig[n].seen) for n in ("p0", "d0")}
    assert set(ranks["p0"]) == {"0", "1"}
    assert set(ranks["d0"]) == {"0", "1", "2", "3"}
    await rig.idle()


async def test_ranks_in_bodies_of_sglang(serve: Serve) -> None:
    rig = await serve(
        {
            "p0": {"connector": "sglang", "dp_size": 3, "bootstrap_port": 8998},
            "d0": {"connector": "sglang", "dp_size": 2},
        },
        scripts={"p0": hand_over},
    )
    await until(rig, lambda found: all(w["state"] == "up" for w in found.values()))
    for _ in range(6):
        assert (await rig.chat(routed_dp_rank=77, disagg_prefill_dp_rank=77)).status_code == 200
    for p, d in zip(rig["p0"].seen, rig["d0"].seen, strict=True):
        rank = int(p.headers["x-data-parallel-rank"])
        assert p.json["routed_dp_rank"] == rank == p.json["bootstrap_room"] % 3
        assert p.json["bootstrap_room"] == d.json["bootstrap_room"] < 2**63
        assert (d.json["routed_dp_rank"], d.json["disagg_prefill_dp_rank"]) == (
            int(d.headers["x-data-parallel-rank"]),
            rank,
        )
    assert len({p.json["routed_dp_rank"] for p in rig["p0"].seen}) > 1


async def test_ranks_of_mooncake(begin: Begin) -> None:
    pair: Pair = await begin(PROTOCOLS["vllm-mooncake-parallel"], p0={"dp_size": 2})
    for _ in range(4):
        assert (await pair.rig.chat()).status_code == 200
    for p, d in zip(pair.rig["p0"].seen, pair.rig["d0"].seen, strict=True):
        rank = int(p.headers["x-data-parallel-rank"])
        params = d.json["kv_transfer_params"]
        assert (params["remote_engine_id"], params["remote_dp_rank"]) == (f"P{rank}", rank)


async def test_the_number_of_ranks_is_asked_for(serve: Serve) -> None:
    rig = await serve({"p0": {}, "d0": {"dp_size": 1}}, {n: {"/get_server_info": SGLANG} for n in ("p0",)})
    workers = await until(rig, lambda found: all(w["state"] == "up" for w in found.values()))
    assert list(workers) == ["d0", "p0@0", "p0@1", "p0@2", "p0@3"]


async def test_ranks_behind_a_dead_address_are_left_together(serve: Serve) -> None:
    """Another rank is no other worker when nobody answers there."""

    async def die(seen: Seen) -> None:
        seen.reset()

    async def answer(seen: Seen) -> None:
        await seen.answer(200, decode_answer("from m1"))

    rig = await serve(
        {"m0": {"dp_size": 8, "weight": 100.0}, "m1": {}},
        scripts={"m0": die, "m1": answer},
        health={**FAST, "interval_s": 60},
        retries={"max": 1},
    )
    await until(rig, lambda found: all(w["state"] == "up" for w in found.values()) and len(found) == 9)
    await rig["m0"].stop()
    response = await rig.chat()
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "from m1")
    workers = await shown(rig)
    assert {w["state"] for w in workers.values() if w["endpoint"] == "m0"} <= {"ejected", "down"}
    await rig.idle()


async def test_kv_events_are_matched_rank_by_rank(serve: Serve) -> None:
    """What one rank's cache holds is known of that rank, and of no other."""
    publishers = [KvEventPublisher("127.0.0.1", 0) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    sources = {str(rank): publisher.source() | {"topic": ""} for rank, publisher in enumerate(publishers)}
    rig = await serve({"p0": {"dp_size": 2}, "d0": {}}, {"p0": {"/kv_event_sources": sources}})
    await until(rig, lambda found: all(w["state"] == "up" for w in found.values()) and len(found) == 3)
    caches = rig.gateway.scheduling.core.caches
    assert caches is not None
    tokens = [list(range(16)), list(range(100, 116))]
    keys = [block_keys(each) for each in tokens]
    serial = 0
    try:
        async with asyncio.timeout(10):
            while [caches.match(each) for each in keys] != [{"p0@0": 16}, {"p0@1": 16}]:
                serial += 1
                for publisher, each in zip(publishers, tokens, strict=True):
                    stored = {"type": "BlockStored", "block_hashes": [serial], "token_ids": each, "block_size": 16}
                    publisher.send(msgspec.msgpack.encode([0.0, [stored | {"parent_block_hash": None}], 0]))
                await asyncio.sleep(0.05)
    finally:
        for publisher in publishers:
            publisher.stop()


def test_sources_of_ranks() -> None:
    worker = Worker.model_validate(
        {"name": "p0", "url": "http://h:1", "role": "prefill", "dp_size": 3, "kv_events": {"endpoint": "tcp://h:5557"}}
    )
    sources = by_member(sources_of(worker, []), "p0", ["p0@0", "p0@1", "p0@2"])
    assert [(name, s.worker, s.endpoint, s.rank) for name, (s,) in sources.items()] == [
        (f"p0@{rank}", f"p0@{rank}", f"tcp://h:{5557 + rank}", rank) for rank in range(3)
    ]
    assert by_member(sources_of(worker, []), "p0", ["p0@0"]) == {"p0@0": sources["p0@0"]}
    many = {"dp_size": 200, "kv_events": {"endpoint": "tcp://h:65500"}}
    with pytest.raises(ConfigError, match="has no port for each of 200 ranks"):
        parse({"workers": [{"name": "p0", "url": "http://h:1", "role": "prefill", **many}]}, "c")


async def test_ranks_leave_together(serve: Serve) -> None:
    rig = await serve({"m0": {"dp_size": 2}, "m1": {}})
    await until(rig, lambda found: len(found) == 3 and all(w["state"] == "up" for w in found.values()))
    config = rig.gateway._config
    rig.gateway.scheduling.configure(config.model_copy(update={"workers": config.workers[1:]}))
    workers = await until(rig, lambda found: len(found) == 1)
    assert list(workers) == ["m1"]
