"""Prompts go where their prefix is, as strongly as it saves work, and the record says what was expected."""

from __future__ import annotations

import pytest

from omni_proxy.api.said import session_of, tenant_of, ttft_target_of
from omni_proxy.call import CHAT, parse_call
from omni_proxy.core import Core, CoreSettings
from omni_proxy.errors import Rejected
from omni_proxy.messages import (
    Arrived,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Close,
    DecodeDone,
    FirstToken,
    Lease,
    LegFailed,
    PrefillDone,
    RequestRecord,
    StartDecode,
    StartPrefill,
    Tokenized,
    Usage,
    WorkerDown,
    WorkerUp,
)
from tests.core.steps import REFUSED, core_of, spec, worker

KEYS = tuple(range(1, 11))
TOKENS = 16 * len(KEYS) + 5


def prefix_core(*names: str) -> Core:
    return core_of(*names, prefix_aware=True)


def arrive(core: Core, rid: str, keys: tuple[int, ...] = KEYS, tokens: int = TOKENS, session: str = "") -> Lease:
    """Bring a request in; returns the lease of its first leg, which must be granted at once."""
    core.handle(Arrived(rid, spec(tokens, tokenize=True, session=session)), 0.0)
    (effect,) = core.handle(Tokenized(rid, tokens, keys), 0.0)
    assert isinstance(effect, StartPrefill | StartDecode)
    return effect.lease


def finish(core: Core, lease: Lease, cached: int = 0, now: float = 1.0) -> RequestRecord:
    """P answers, D answers; returns the record."""
    (effect,) = core.handle(PrefillDone(lease, True, usage=Usage(None, 1, cached)), now)
    assert isinstance(effect, StartDecode)
    core.handle(FirstToken(effect.lease), now)
    (close,) = core.handle(DecodeDone(effect.lease, Usage()), now)
    assert isinstance(close, Close)
    core.check()
    return close.record


def test_the_next_prompt_goes_where_its_prefix_is() -> None:
    core = prefix_core("p0", "p1", "p2", "d0")
    first = arrive(core, "a")
    assert finish(core, first).predicted_tokens == 0
    for rid in ("b", "c"):
        again = arrive(core, rid)
        assert again.worker == first.worker
        assert finish(core, again, 160).predicted_tokens == 160


def test_a_prefix_that_saves_less_than_the_wait_costs_does_not_draw() -> None:
    core = prefix_core("p0", "p1", "d0")
    keys = tuple(range(1, 41))
    core.handle(BlocksStored("p0", 0, 16, keys), 0.0)
    assert arrive(core, "a", keys, 645).worker == "p0"  # 5 tokens to compute
    assert arrive(core, "b", keys, 645).worker == "p0"  # sooner behind a short prompt than by computing 645
    assert arrive(core, "c", keys[:1], 30).worker == "p1"  # 14 tokens behind two prompts, or 30 at once


def test_what_all_workers_have_draws_nowhere() -> None:
    core = prefix_core("p0", "p1", "p2", "d0")
    for name in ("p0", "p1", "p2"):
        core.handle(BlocksStored(name, 0, 16, KEYS), 0.0)
    placed = {arrive(core, f"r{n}", (*KEYS, 100 + n), TOKENS + 16).worker for n in range(6)}
    assert placed == {"p0", "p1", "p2"}


def test_uncached_tokens_are_what_a_worker_is_charged_for() -> None:
    core = prefix_core("p0", "d0")
    core.handle(BlocksStored("p0", 0, 16, KEYS), 0.0)
    arrive(core, "a")
    assert [w.prefill_tokens for w in core.workers() if w.spec.name == "p0"] == [5]
    core.check()


def test_events_are_believed_and_a_whole_prompt_is_never_cached() -> None:
    core = prefix_core("p0", "p1", "d0")
    core.handle(BlocksStored("p1", 0, 16, KEYS), 0.0)
    lease = arrive(core, "a", tokens=160)
    assert lease.worker == "p1"
    assert finish(core, lease, 159).predicted_tokens == 159
    core.handle(BlocksRemoved("p1", 0, KEYS[3:]), 5.0)
    assert finish(core, arrive(core, "b"), 48, now=10.0).predicted_tokens in (48, 160)
    core.handle(CacheCleared("p1", 0), 20.0)
    assert finish(core, arrive(core, "c"), 0, now=20.0).predicted_tokens == 0


def test_a_burst_of_equal_prompts_is_computed_once_on_each_worker_at_most() -> None:
    core = prefix_core("p0", "p1", "p2", "d0")
    for name in ("p0", "p1", "p2"):  # all tell, so only grants can say what comes
        core.handle(BlocksStored(name, 0, 16, (999,)), 0.0)
    used = {arrive(core, f"r{n}").worker for n in range(2)}
    computed = sum(w.prefill_tokens for w in core.workers())
    assert computed == len(used) * TOKENS + (2 - len(used)) * 5


def test_a_leg_that_failed_leaves_nothing_behind() -> None:
    core = prefix_core("p0", "d0")
    lease = arrive(core, "a")
    core.handle(LegFailed(lease, REFUSED), 1.0)
    core.handle(WorkerDown("p0", "gone"), 2.0)
    core.handle(WorkerUp(worker("p0")), 3.0)
    assert core.caches is not None
    assert core.caches.match(KEYS) in ({}, {"p0": 160})
    core.check()


def test_cold_prompts_of_one_session_have_one_home_on_every_replica() -> None:
    names = [f"p{n}" for n in range(6)]
    homes = []
    for _ in range(2):
        core = prefix_core(*names, "d0")
        placed = []
        for number in range(5):
            lease = arrive(core, f"r{number}", (1000 + number,), 20, session="s1")
            placed.append(lease.worker)
            finish(core, lease)
        assert len(set(placed)) == 1
        homes.append(placed[0])
    assert homes[0] == homes[1]


def test_without_prefix_awareness_nothing_is_looked_up() -> None:
    core = Core(CoreSettings())
    assert core.caches is None
    for name in ("p0", "p1", "d0"):
        core.handle(WorkerUp(worker(name)), 0.0)
    core.handle(BlocksStored("p1", 0, 16, KEYS), 0.0)
    assert finish(core, arrive(core, "a")).predicted_tokens == 0
    assert core.caches is None


def test_a_session_is_the_clients_header() -> None:
    assert session_of(b"accept: */*\r\nx-session-id: abc\r\nx-forwarded-for: 1\r\n") == "abc"
    assert session_of(b"x-session-id: abc\r\n") == "abc"
    assert session_of(b"not-x-session-id: abc\r\n") == ""
    assert session_of(b"x-session-id: " + b"a" * 999 + b"\r\n") == ""
    assert session_of(b"") == ""


def test_a_tenant_is_a_header_or_a_digest_of_the_key() -> None:
    assert tenant_of(b"x-tenant-id: acme\r\nauthorization: Bearer k\r\n") == "acme"
    first, second = (tenant_of(b"authorization: Bearer %b\r\n" % key) for key in (b"secret-1", b"secret-2"))
    assert first != second
    assert first.startswith("key-")
    assert "secret" not in first
    assert tenant_of(b"accept: */*\r\n") == ""


def test_a_target_is_a_positive_number_of_seconds() -> None:
    assert ttft_target_of(b"x-ttft-target-s: 1.5\r\n") == 1.5
    for text in (b"0", b"-1", b"nan", b"inf", b"soon", b""):
        assert ttft_target_of(b"x-ttft-target-s: %b\r\n" % text) is None
    assert ttft_target_of(b"") is None


def test_a_target_may_stand_in_the_body() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"ttft_target_s":%b}'
    assert parse_call(CHAT, body % b"0.5").ttft_target_s == 0.5
    assert parse_call(CHAT, body % b"null").ttft_target_s is None
    for text in (b"0", b"-1", b'"soon"', b"1e7"):
        with pytest.raises(Rejected, match="'ttft_target_s' is not valid") as raised:
            parse_call(CHAT, body % text)
        assert raised.value.param == "ttft_target_s"
        assert text.decode() in str(raised.value)
