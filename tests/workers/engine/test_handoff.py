"""KV goes from a prefill engine to a decode engine over a real socket: right, counted, or clearly refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from omni_proxy.workers.engine import handoff as handoff_module
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import EngineConfig, FinishReason, Handoff, Output
from tests.workers.engine.helpers import Call, generate, prompt, pull_from, request, running, until

TOKENS = prompt(38)
BLOCKS = 10


@pytest.fixture
def start(tied: Path) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test."""
    with ExitStack() as stack:

        def enter(engine_id: str, model: Path = tied, **config: Any) -> Engine:
            config = {"kv_pull_timeout_s": 1.0, **config}
            return stack.enter_context(running(model, engine_id=engine_id, **config))

        yield enter


def prefill(engine: Engine, request_id: str = "p", tokens: tuple[int, ...] = TOKENS) -> Handoff:
    last = Call(engine, request(request_id, tokens, 1, keep_kv=True)).end()
    assert last.handoff is not None
    return last.handoff


def decode(engine: Engine, handoff: Handoff, name: str = "d", tokens: tuple[int, ...] = TOKENS, **changes: Any) -> Call:
    return Call(engine, request(name, tokens, pull=pull_from(handoff, **changes)))


def error_of(call: Call) -> str:
    last: Output = call.end()
    assert last.finish_reason is FinishReason.ABANDONED
    assert call.tokens == []
    assert last.error is not None
    assert last.error.startswith("KV pull failed: ")
    return last.error.removeprefix("KV pull failed: ")


@pytest.mark.parametrize("length", [1, 4, 5, 38, 40])
def test_a_pulled_prompt_gives_the_tokens_of_one_engine(
    start: Callable[..., Engine], checkpoint: Path, length: int
) -> None:
    tokens = prompt(length, seed=length)
    p, d, mixed = (start(name, checkpoint) for name in ("P", "D", "M"))
    handoff = prefill(p, tokens=tokens)
    blocks = -(-length // 4)
    assert (handoff.num_tokens, len(handoff.block_ids), handoff.engine_id) == (length, blocks, "P")
    assert p.stats().blocks_leased == p.stats().blocks_used == blocks
    call = decode(d, handoff, tokens=tokens)
    assert call.tokens == generate(mixed, "m", tokens)
    assert call.end().cached_tokens == length - 1

    until(lambda: p.stats().blocks_used == 0, "release on P")
    sent, received = p.stats(), d.stats()
    assert (sent.prompt_tokens_computed, received.prompt_tokens_computed) == (length, 1)
    assert received.prompt_tokens_pulled == length - 1
    assert sent.kv_bytes_sent == received.kv_bytes_received == blocks * sent.block_bytes
    assert (sent.kv_transfers, received.kv_transfers, received.kv_transfer_failures) == (1, 1, 0)


def test_the_blocks_go_in_many_pieces(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "blocks_per_piece", lambda _: 1)
    p, d = start("P"), start("D")
    want = generate(start("M"), "m", TOKENS)
    assert decode(d, prefill(p)).tokens == want


def test_several_pulls_at_once(start: Callable[..., Engine]) -> None:
    p, d, mixed = (start(name) for name in ("P", "D", "M"))
    prompts = [prompt(20 + n, seed=n) for n in range(6)]
    handoffs = [prefill(p, str(n), tokens) for n, tokens in enumerate(prompts)]
    calls = [decode(d, h, str(n), prompts[n]) for n, h in enumerate(handoffs)]
    for n, call in enumerate(calls):
        assert call.tokens == generate(mixed, str(n), prompts[n])
    until(lambda: p.stats().blocks_used == 0, "release on P")


def test_a_pulled_prompt_is_cached_on_both_sides(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    want = generate(start("M"), "m", (*TOKENS, 5, 6))
    decode(d, prefill(p)).end()
    longer = (*TOKENS, 5, 6)
    assert generate(d, "local", longer) == want
    assert d.stats().prompt_tokens_computed == 1 + 4  # 36 of 40 tokens were cached
    handoff = prefill(p, "again", longer)
    assert handoff.cached_tokens == 36
    before = d.stats().kv_bytes_received
    assert decode(d, handoff, "again", longer).tokens == want
    assert d.stats().kv_bytes_received - before == 0  # all ten blocks were there


def test_blocks_that_the_cache_has_are_not_pulled(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    generate(d, "warm", TOKENS[:22], 1)
    call = decode(d, prefill(p))
    assert call.tokens == generate(start("M"), "m", TOKENS)
    stats = d.stats()
    assert stats.kv_bytes_received == (BLOCKS - 5) * stats.block_bytes
    assert (stats.prompt_tokens_cached, stats.prompt_tokens_pulled) == (20, 17)
    until(lambda: p.stats().blocks_used == 0, "release on P")


def test_a_pull_of_nothing_still_frees_the_keeper(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    tokens = prompt(16)
    generate(d, "warm", tokens, 1)
    assert decode(d, prefill(p, tokens=tokens), tokens=tokens).tokens == generate(d, "m", tokens)
    until(lambda: p.stats().blocks_used == 0, "release on P")
    assert p.stats().kv_bytes_sent == 0


def test_kv_of_a_part_of_the_prompt_is_used(start: Callable[..., Engine]) -> None:
    """A decode leg that was begun elsewhere goes on here: its prompt has grown since."""
    p, d = start("P"), start("D")
    longer = (*TOKENS, *prompt(7, seed=9))
    assert decode(d, prefill(p), tokens=longer).tokens == generate(start("M"), "m", longer)
    assert d.stats().prompt_tokens_computed == 7


# -- leases


def test_a_stop_keeps_nothing(start: Callable[..., Engine]) -> None:
    p = start("P")
    token = generate(p, "probe", TOKENS, 1)[0]
    asked = request("p", TOKENS, keep_kv=True)
    sampling = asked.sampling.__class__(8, temperature=0, stop_token_ids=frozenset({token}))
    last = Call(p, request("p", TOKENS, keep_kv=True, sampling=sampling)).end()
    assert (last.finish_reason, last.handoff) == (FinishReason.STOP, None)
    assert p.stats().blocks_used == 0


def test_a_lease_expires_and_a_late_pull_is_refused(start: Callable[..., Engine]) -> None:
    p, d = start("P", kv_lease_s=0.05), start("D")
    handoff = prefill(p)
    assert handoff.expires_in_s == 0.05
    until(lambda: p.stats().kv_leases_expired == 1, "expiry")
    assert p.stats().blocks_used == 0
    assert error_of(decode(d, handoff)) == "refused: no KV is kept for request p (never, or no longer)"
    assert (d.stats().kv_transfer_failures, d.stats().blocks_used) == (1, 0)
    assert Call(d, request("after", TOKENS, 1)).end().cached_tokens == 0  # nothing wrong was cached


def test_release_frees_at_once(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    handoff = prefill(p)
    p.release("p")
    p.release("p")
    until(lambda: p.stats().blocks_used == 0, "release")
    assert "no KV is kept" in error_of(decode(d, handoff))


def test_a_lease_holds_memory_and_requests_wait_for_it(start: Callable[..., Engine]) -> None:
    p = start("P", kv_cache_bytes=12 * 2048)
    prefill(p)
    waiting = Call(p, request("w", prompt(12, seed=3), 2))
    until(lambda: p.stats().waiting == 1, "waiting")
    p.release("p")
    assert len(waiting.tokens) == 2


def test_an_id_under_lease_is_refused_for_a_new_request(start: Callable[..., Engine]) -> None:
    p = start("P")
    prefill(p)
    with pytest.raises(ValueError, match="in use"):
        Call(p, request("p", TOKENS, 1, keep_kv=True))


def test_aborting_the_decode_leg_frees_the_keeper(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D", max_num_seqs=1)
    busy = Call(d, request("busy", prompt(8), 200))
    busy.next()
    call = decode(d, prefill(p))
    d.abort("d")
    assert call.end().finish_reason is FinishReason.ABORT
    until(lambda: p.stats().blocks_used == 0, "release on P")
    d.abort("busy")
    busy.end()


def test_stopping_the_keeper_drops_its_leases(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    handoff = prefill(p)
    p.stop()
    assert "no answer for 1 s (0 of 1 pieces came)" in error_of(decode(d, handoff))


# -- refusals: never wrong KV


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_id": "Q"}, "this is engine P, not Q"),
        ({"request_id": "other"}, "does not have these blocks"),
        ({"request_id": "nobody"}, "no KV is kept for request nobody"),
        ({"block_ids": (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}, "does not have these blocks"),
        ({"block_ids": (0,)}, "does not have these blocks"),
        ({"num_tokens": 37}, "has KV of 38 tokens, not 37"),
    ],
)
def test_parameters_that_do_not_match_are_refused(
    start: Callable[..., Engine], changes: dict[str, Any], reason: str
) -> None:
    p, d = start("P"), start("D")
    prefill(p, "other", prompt(38, seed=4))
    assert reason in error_of(decode(d, prefill(p), **changes))
    assert d.stats().blocks_used == 0
    assert p.stats().blocks_leased == 2 * BLOCKS  # the owner of the lease can still come


def test_another_prompt_of_the_same_length_is_refused(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    call = decode(d, prefill(p), tokens=prompt(38, seed=5))
    assert "had another prompt" in error_of(call)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"block_size": 8}, "block_size is 4 here and 8 there"),
        ({"dtype": "bfloat16"}, "dtype is float32 here and bfloat16 there"),
    ],
)
def test_another_layout_is_refused(start: Callable[..., Engine], config: dict[str, Any], reason: str) -> None:
    assert reason in error_of(decode(start("D", **config), prefill(start("P"))))


def test_other_weights_are_refused(start: Callable[..., Engine], write_checkpoint: Callable[..., Path]) -> None:
    d = start("D", write_checkpoint("tied", seed=1))
    assert "KV layouts differ: weights" in error_of(decode(d, prefill(start("P"))))


# -- failures on the way


def test_an_unreachable_keeper_fails_or_is_recomputed(start: Callable[..., Engine]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    handoff = prefill(start("P"))
    assert "no answer for 1 s" in error_of(decode(start("D"), handoff, port=port))
    d = start("R", kv_load_failure_policy="recompute")
    call = decode(d, handoff, port=port)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    assert call.end().cached_tokens == 0
    assert d.stats().prompt_tokens_computed == len(TOKENS)


def test_an_address_that_is_none_fails(start: Callable[..., Engine]) -> None:
    error = error_of(decode(start("D"), prefill(start("P")), host="not a host"))
    assert error.startswith(("cannot reach not a host", "no answer"))


class Meddler:
    """Sits between puller and keeper and passes messages on through `change`, which may alter or drop them."""

    def __init__(self, port: int, change: Callable[[dict[str, Any], list[bytes]], list[list[bytes]]]) -> None:
        self.change = change
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self.back_port = port
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while not self.stopping.is_set():
            if self.front.poll(5):
                peer, frame = self.front.recv_multipart()
                if peer not in backs:
                    backs[peer] = self.context.socket(zmq.DEALER)
                    backs[peer].connect(f"tcp://127.0.0.1:{self.back_port}")
                backs[peer].send(frame)
            for peer, back in backs.items():
                while back.poll(0):
                    header, *payload = back.recv_multipart()
                    for frames in self.change(json.loads(header), payload):
                        self.front.send_multipart([peer, header, *frames])
        for opened in (*backs.values(), self.front):
            opened.close(linger=0)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(5)
        self.context.term()


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Meddler]]:
    monkeypatch.setattr(handoff_module, "blocks_per_piece", lambda _: 3)
    meddlers: list[Meddler] = []

    def begin(*args: Any) -> Meddler:
        meddlers.append(Meddler(*args))
        return meddlers[-1]

    yield begin
    for meddler in meddlers:
        meddler.stop()


def test_damage_and_copies_on_the_way_are_repaired(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    damaged: set[int] = set()

    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        if header["kind"] == "piece" and header["seq"] in (0, 2) and header["seq"] not in damaged:
            damaged.add(header["seq"])
            return [[b"\x01" + payload[0][1:]]]
        return [payload, payload]

    p, d = start("P"), start("D")
    handoff = prefill(p)
    call = decode(d, handoff, port=meddle(handoff.port, change).port)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    assert d.stats().kv_bytes_received == BLOCKS * d.stats().block_bytes
    assert damaged == {0, 2}


def test_a_link_that_damages_everything_fails_the_pull(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [[piece[:-1] + b"\x01" for piece in payload]]

    p, d = start("P"), start("D")
    handoff = prefill(p)
    assert "wrong size or checksum" in error_of(decode(d, handoff, port=meddle(handoff.port, change).port))
    assert p.stats().blocks_leased == BLOCKS


def test_a_keeper_that_dies_half_way_fails_the_pull(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [] if header["kind"] == "piece" and header["seq"] >= 2 else [payload]

    p, d = start("P"), start("D")
    handoff = prefill(p)
    error = error_of(decode(d, handoff, port=meddle(handoff.port, change).port))
    assert error == "no answer for 1 s (2 of 4 pieces came)"
    assert d.stats().blocks_used == 0
    assert Call(d, request("after", TOKENS, 1)).end().cached_tokens == 0


def test_aborting_during_the_pull_leaves_nothing_behind(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [] if header["kind"] == "piece" else [payload]

    p, d = start("P"), start("D", kv_pull_timeout_s=60.0)
    handoff = prefill(p)
    call = decode(d, handoff, port=meddle(handoff.port, change).port)
    until(lambda: p.stats().kv_bytes_sent > 0, "pieces on the way")
    d.abort("d")
    assert call.end().finish_reason is FinishReason.ABORT
    until(lambda: p.stats().blocks_used == 0, "release on P")
    assert d.stats().blocks_used == 0


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"{"],
        [b"[]"],
        [b"\xff\xfe"],
        [b"[" * 100_000],
        [b'{"kind": "open"}'],
        [b'{"kind": "read", "request_id": "p", "serial": 1, "first": 0, "count": 99, "seq": 0}'],
        [b'{"kind": "read", "request_id": "p", "serial": 1, "first": -1, "count": 1, "seq": 0}'],
        [b'{"kind": "read", "serial": "x"}'],
        [b'{"kind": "done", "request_id": "p", "serial": 99}'],
        [b'{"kind": "done", "request_id": "p"}'],
        [b'{"kind": "release", "request_id": "p"}'],
        [b'{"kind": []}', b"more", b"frames"],
        [b'{"kind": "join"}'],
        [b'{"kind": "join", "room": 1, "num_tokens": 4, "prompt_digest": "", "layout": {}, "grid": [1, 0, 0, 0]}'],
        [b'{"kind": "leave", "room": "x"}'],
        [b'{"kind": "leave", "room": 99}'],
        [b'{"kind": "ack", "room": 99, "serial": 1, "seq": 0}'],
        [b'{"kind": "done", "room": 99, "serial": 1}'],
        [b'{"kind": "ping", "room": null}'],
    ],
)
def test_nonsense_on_the_side_channel_ends_no_lease(start: Callable[..., Engine], frames: list[bytes]) -> None:
    p, d = start("P"), start("D")
    handoff = prefill(p)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{handoff.port}")
        stranger.send_multipart(frames)
        stranger.send(b'{"kind": "hello"}')  # refused: the message before has been dealt with
        while json.loads(stranger.recv())["reason"] != "unknown kind 'hello'":
            pass
    assert p.stats().blocks_leased == BLOCKS
    assert len(decode(d, handoff).tokens) == 8


def test_a_taken_port_is_an_error(tied: Path, start: Callable[..., Engine]) -> None:
    port = start("P").info.side_channel_port
    with pytest.raises(OSError, match=f"cannot serve KV on 127.0.0.1:{port}"):
        Engine(EngineConfig(str(tied), side_channel_port=port))
