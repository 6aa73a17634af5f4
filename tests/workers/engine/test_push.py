"""KV is pushed from a prefill engine to a decode engine while it is computed: right, overlapped, or clearly refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.workers.engine import handoff as handoff_module
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import FinishReason, InvalidRequest, JoinRoom, Output
from tests.workers.engine.helpers import Call, generate, greedy, prompt, pull_from, request, running, until
from tests.workers.engine.test_handoff import Meddler

TOKENS = prompt(38)
BLOCKS = 10
LAYERS = 2


@pytest.fixture
def start(tied: Path) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test."""
    with ExitStack() as stack:

        def enter(engine_id: str, model: Path = tied, **config: Any) -> Engine:
            return stack.enter_context(running(model, engine_id=engine_id, **{"kv_pull_timeout_s": 1.0, **config}))

        yield enter


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "blocks_per_push", lambda _: 3)


def prefill(engine: Engine, room: int = 1, name: str = "p", tokens: tuple[int, ...] = TOKENS, **kw: Any) -> Call:
    return Call(engine, request(name, tokens, 1, keep_kv=True, room=room, **kw))


def decode(
    d: Engine, p: Engine, room: int = 1, name: str = "d", tokens: tuple[int, ...] = TOKENS, port: int | None = None
) -> Call:
    join = JoinRoom("127.0.0.1", port or p.info.side_channel_port, room)
    return Call(d, request(name, tokens, join=join))


def error_of(call: Call) -> str:
    last: Output = call.end()
    assert last.finish_reason is FinishReason.ABANDONED
    assert call.tokens == []
    assert last.error is not None
    return last.error.removeprefix("KV push failed: ")


def home(*engines: Engine) -> None:
    for engine in engines:
        until(lambda engine=engine: engine.stats().blocks_used == 0, f"{engine.config.engine_id} holds no block")  # type: ignore[misc]


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 38, 40])
def test_a_pushed_prompt_gives_the_tokens_of_one_engine(
    start: Callable[..., Engine], checkpoint: Path, length: int, decode_first: bool
) -> None:
    tokens = prompt(length, seed=length)
    p, d, mixed = (start(name, checkpoint) for name in ("P", "D", "M"))
    if decode_first:
        call = decode(d, p, tokens=tokens)
        leg = prefill(p, tokens=tokens)
    else:
        leg = prefill(p, tokens=tokens)
        leg.end()
        call = decode(d, p, tokens=tokens)
    assert call.tokens == generate(mixed, "m", tokens)
    assert call.end().cached_tokens == length - 1
    assert leg.end().finish_reason is FinishReason.LENGTH
    until(lambda: p.stats().blocks_used == 0, "release on P")
    sent, received = p.stats(), d.stats()
    assert (sent.prompt_tokens_computed, received.prompt_tokens_computed) == (length, 1)
    blocks = -(-length // 4)
    assert sent.kv_bytes_sent == received.kv_bytes_received == blocks * sent.block_bytes
    assert (sent.kv_pushes, sent.kv_transfers, received.kv_transfers, received.kv_transfer_failures) == (1, 1, 1, 0)


@pytest.mark.usefixtures("small_pieces")
def test_a_prompt_in_many_chunks_and_pieces(start: Callable[..., Engine]) -> None:
    p, d = start("P", max_num_batched_tokens=7, max_num_seqs=2), start("D")
    want = generate(start("M"), "m", TOKENS)
    call = decode(d, p)
    leg = prefill(p)
    assert call.tokens == want
    assert leg.end().finish_reason is FinishReason.LENGTH
    home(p, d)


@pytest.mark.usefixtures("small_pieces")
def test_layers_leave_while_the_next_is_computed(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that stops after its first layer: that layer's pieces arrive, the others cannot."""
    p, d = start("P"), start("D")
    run = p._runner.run
    seen: list[int] = []

    def slow(chunks: Any, progress: Any = None) -> Any:
        if progress is not None:
            drawn = run(chunks, None)  # the cache is filled; what may leave is told below
            progress.layer_done(1)
            until(lambda: d._transfers.puller is not None and arrived(d) == 4, "the first layer at D")
            seen.append(arrived(d))
            return drawn
        return run(chunks)

    monkeypatch.setattr(p._runner, "run", slow)
    call = decode(d, p)
    until(lambda: p._transfers.pusher._book.num_early == 1, "the join at P")
    prefill(p)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    assert seen == [4]  # of 2 x 4 pieces
    assert p.stats().kv_push_hidden_s > 0


def arrived(engine: Engine) -> int:
    return sum(t._ask.grid.count - len(t._missing) for t, _ in engine._transfers._pulls.values())


def test_several_rooms_at_once(start: Callable[..., Engine]) -> None:
    p, d, mixed = (start(name) for name in ("P", "D", "M"))
    prompts = [prompt(20 + n, seed=n) for n in range(6)]
    calls = [decode(d, p, n, str(n), tokens) for n, tokens in enumerate(prompts)]
    legs = [prefill(p, n, str(n), tokens) for n, tokens in enumerate(prompts)]
    for n, call in enumerate(calls):
        assert call.tokens == generate(mixed, str(n), prompts[n])
        legs[n].end()
    home(p, d)


def test_blocks_that_the_cache_has_are_not_pushed(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    generate(d, "warm", TOKENS[:22], 1)
    call = decode(d, p)
    prefill(p)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    stats = d.stats()
    assert stats.kv_bytes_received == (BLOCKS - 5) * stats.block_bytes
    home(p)


def test_a_receiver_that_lacks_nothing_frees_the_sender(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    tokens = prompt(16)
    want = generate(d, "warm", tokens)
    call = decode(d, p, tokens=tokens)
    assert call.tokens == want
    until(lambda: p._transfers.pusher._book.num_early == 1, "the receiver's leave")
    assert prefill(p, tokens=tokens).end().handoff is None  # left before it was opened
    prefill(p, 2, "q", tokens).end()
    decode(d, p, 2, "e", tokens).end()
    home(p, d)


def test_a_prefix_that_the_sender_has_leaves_at_once(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    generate(p, "warm", TOKENS, 1)
    call = decode(d, p)
    prefill(p)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    home(p)


def test_who_does_not_join_may_still_pull(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D")
    handoff = prefill(p).end().handoff
    call = Call(d, request("d", TOKENS, pull=pull_from(handoff)))
    assert call.tokens == generate(start("M"), "m", TOKENS)
    home(p)
    prefill(p, name="again").end()  # the room is free again


def test_a_room_in_use_is_refused(start: Callable[..., Engine]) -> None:
    p = start("P")
    prefill(p).end()
    with pytest.raises(InvalidRequest, match="bootstrap_room: 1 is in use"):
        prefill(p, name="other", tokens=prompt(9))
    assert prefill(p, 2, "other", prompt(9)).end().handoff is not None


# -- failures


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_that_never_comes(start: Callable[..., Engine], policy: str) -> None:
    p, d = start("P"), start("D", kv_load_failure_policy=policy, kv_pull_timeout_s=0.2)
    call = decode(d, p)
    if policy == "fail":
        assert error_of(call) == "no sign of the prefill worker for 0.2 s (0 of 2 pieces came)"
    else:
        assert call.tokens == generate(start("M"), "m", TOKENS)
        assert d.stats().prompt_tokens_computed == len(TOKENS)
    home(d)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (TOKENS[:-1], "has a prompt of 38 tokens, not 37"),
        ((*TOKENS[:-1], (TOKENS[-1] + 1) % 256), "another prompt or cache salt"),
    ],
)
def test_another_prompt_is_refused(start: Callable[..., Engine], tokens: tuple[int, ...], reason: str) -> None:
    p, d = start("P"), start("D")
    leg = prefill(p)
    assert reason in error_of(decode(d, p, tokens=tokens))
    leg.end()
    p.release("p")
    home(p, d)


@pytest.mark.parametrize("config", [{"block_size": 8}, {"dtype": "bfloat16"}])
def test_another_layout_is_refused(start: Callable[..., Engine], config: dict[str, Any]) -> None:
    p, d = start("P"), start("D", **config)
    assert "KV layouts differ" in error_of(decode(d, p))


def test_a_prefill_that_is_aborted_ends_the_decode(start: Callable[..., Engine]) -> None:
    p, d = start("P", max_num_seqs=1), start("D")
    busy = Call(p, request("busy", prompt(8), 240))
    busy.next()
    leg, call = prefill(p), decode(d, p)
    until(lambda: d._transfers._pulls != {}, "the join")
    p.abort("p")
    assert leg.end().finish_reason is FinishReason.ABORT
    assert error_of(call) in (
        "refused: room 1: the prefill has ended: abort",
        "no sign of the prefill worker for 1 s (0 of 2 pieces came)",
    )
    p.abort("busy")
    busy.end()
    home(p, d)


def test_a_prefill_that_breaks_ends_the_decode(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = start("P"), start("D")

    def broken(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(p._runner, "run", broken)
    call = decode(d, p)
    until(lambda: p._transfers.pusher._book.num_early == 1, "the join at P")
    assert prefill(p).end().error == "RuntimeError: no luck"
    assert error_of(call) == "refused: room 1: the prefill has ended: error"
    home(p, d)


def test_aborting_the_decode_leg_frees_the_sender(start: Callable[..., Engine]) -> None:
    p, d = start("P"), start("D", max_num_seqs=1)
    busy = Call(d, request("busy", prompt(8), 200))
    busy.next()
    prefill(p).end()
    call = decode(d, p)
    d.abort("d")
    assert call.end().finish_reason is FinishReason.ABORT
    home(p)
    d.abort("busy")
    busy.end()


def test_a_receiver_that_dies_leaves_a_lease_that_ends(start: Callable[..., Engine], tied: Path) -> None:
    p = start("P", kv_lease_s=0.2)
    with running(tied, engine_id="dies", kv_pull_timeout_s=30.0) as d:
        call = decode(d, p)
        until(lambda: p._transfers.pusher._book.num_early == 1, "the join at P")
        d.stop()
    assert call.end().finish_reason is FinishReason.ABORT
    assert prefill(p).end().finish_reason is FinishReason.LENGTH
    home(p)


def test_a_sender_that_dies_is_noticed(start: Callable[..., Engine], tied: Path) -> None:
    d = start("D", kv_pull_timeout_s=0.3)
    with running(tied, engine_id="dies", max_num_seqs=1) as p:
        busy = Call(p, request("busy", prompt(8), 240))
        busy.next()
        prefill(p)
        call = decode(d, p)
        until(lambda: d._transfers._pulls != {}, "the join")
        p.stop()
    assert error_of(call).startswith(("no sign of the prefill worker", "refused"))
    home(d)


@pytest.fixture
def meddle(small_pieces: None) -> Iterator[Callable[..., Meddler]]:
    meddlers: list[Meddler] = []

    def begin(*args: Any) -> Meddler:
        meddlers.append(Meddler(*args))
        return meddlers[-1]

    yield begin
    for meddler in meddlers:
        meddler.stop()


def through(p: Engine, change: Callable[[dict[str, Any], list[bytes]], list[list[bytes]]], begin: Any) -> int:
    port: int = begin(p.info.side_channel_port, change).port
    return port


def test_damage_loss_and_copies_on_the_way_are_repaired(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    hurt: set[int] = set()

    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        if header["kind"] == "layer" and header["seq"] not in hurt:
            hurt.add(header["seq"])
            if header["seq"] in (0, 5):
                return [[b"\x01" + payload[0][1:]]]
            if header["seq"] in (2, 7):
                return []
        return [payload, payload]

    p, d = start("P"), start("D", kv_pull_timeout_s=0.4)
    call = decode(d, p, port=through(p, change, meddle))
    prefill(p)
    assert call.tokens == generate(start("M"), "m", TOKENS)
    assert d.stats().kv_bytes_received == BLOCKS * d.stats().block_bytes
    home(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_link_that_damages_everything(
    start: Callable[..., Engine], meddle: Callable[..., Meddler], policy: str
) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [[piece[:-1] + bytes([piece[-1] ^ 1]) for piece in payload]]

    p, d = start("P"), start("D", kv_load_failure_policy=policy)
    call = decode(d, p, port=through(p, change, meddle))
    prefill(p)
    if policy == "fail":
        assert "wrong size or checksum" in error_of(call)
    else:
        assert call.tokens == generate(start("M"), "m", TOKENS)
    home(p, d)
    assert d.stats().kv_transfer_failures == 1


def test_a_sender_that_falls_silent_half_way(start: Callable[..., Engine], meddle: Callable[..., Meddler]) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [] if header["kind"] == "alive" or header.get("seq", 0) >= 3 else [payload]

    p, d = start("P", kv_lease_s=0.2), start("D", kv_pull_timeout_s=0.3)
    call = decode(d, p, port=through(p, change, meddle))
    prefill(p)
    assert error_of(call) == "no sign of the prefill worker for 0.3 s (3 of 8 pieces came)"
    assert Call(d, request("after", TOKENS, 1)).end().cached_tokens == 0  # nothing half pushed was cached
    home(p, d)


def test_aborting_during_the_push_leaves_nothing_behind(
    start: Callable[..., Engine], meddle: Callable[..., Meddler]
) -> None:
    def change(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [] if header.get("seq", 0) >= 3 else [payload]

    p, d = start("P"), start("D", kv_pull_timeout_s=60.0)
    call = decode(d, p, port=through(p, change, meddle))
    prefill(p)
    until(lambda: arrived(d) == 3, "pieces at D")
    d.abort("d")
    assert call.end().finish_reason is FinishReason.ABORT
    home(d, p)


def test_a_piece_of_another_prompt_is_not_taken(start: Callable[..., Engine], meddle: Callable[..., Meddler]) -> None:
    late: list[list[bytes]] = []

    def keep(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        late.extend([payload] if header.get("seq") == 0 else [])
        return [payload]

    def mix(header: dict[str, Any], payload: list[bytes]) -> list[list[bytes]]:
        return [late.pop(), payload] if header.get("seq") == 0 and late else [payload]

    p, d = start("P"), start("D")
    first = decode(d, p, port=through(p, keep, meddle))
    prefill(p)
    first.end()
    other = prompt(38, seed=8)
    second = decode(d, p, 2, "e", other, port=through(p, mix, meddle))
    prefill(p, 2, "q", other)
    assert second.tokens == generate(start("M"), "m", other)
    assert late == []
    home(p, d)


def test_sampling_does_not_depend_on_the_handoff(start: Callable[..., Engine]) -> None:
    sampling = greedy(8, seed=3).__class__(8, temperature=0.9, seed=3, ignore_eos=True)
    p, d, mixed = (start(name) for name in ("P", "D", "M"))
    want = Call(mixed, request("m", TOKENS, sampling=sampling)).tokens
    join = JoinRoom("127.0.0.1", p.info.side_channel_port, 1)
    call = Call(d, request("d", TOKENS, sampling=sampling, join=join))
    prefill(p)
    assert call.tokens == want
