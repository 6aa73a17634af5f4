"""A feed over a stream that loses, repeats and begins anew ends with what the publisher holds, never with more."""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.apc import feed as feed_module
from omni_proxy.apc.block_index import BlockIndex
from omni_proxy.apc.feed import Change, Feed
from omni_proxy.apc.index import Tier
from omni_proxy.apc.keys import block_keys
from omni_proxy.apc.translate import Translator
from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared

BLOCK = 32
encode = msgspec.msgpack.encode


class Publisher:
    """An engine's cache: stores prompts, evicts the oldest, numbers its messages, keeps the last ones for replays."""

    def __init__(self, seed: int, form: str, keeps: int = 1000) -> None:
        self.random = Random(seed)
        self.form = form
        self.keeps = keeps
        self.sent: list[bytes] = []
        self.blocks: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Engine hash -> the whole prefix that ends with this block."""

    def step(self) -> tuple[int, bytes]:
        """One message of a few events."""
        events = [self._event() for _ in range(self.random.randrange(1, 4))]
        self.sent.append(batch(self.form, events))
        return len(self.sent) - 1, self.sent[-1]

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(start, len(self.sent) - self.keeps)
        return [(number, self.sent[number]) for number in range(first, len(self.sent))]

    def keys(self) -> set[int]:
        """Our names of what the cache holds."""
        return {block_keys(prefix)[-1] for prefix in self.blocks.values()}

    def _event(self) -> dict[str, Any]:
        if len(self.blocks) > 40 or (self.blocks and self.random.random() < 0.3):
            name, _ = self.blocks.popitem(last=False)
            return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}
        if self.random.random() < 0.02:
            self.blocks.clear()
            return {"type": "AllBlocksCleared"}
        parent = self.random.choice([None, *self.blocks])
        prefix = self.blocks[parent] if parent is not None else ()
        count = self.random.randrange(1, 4)
        tokens = tuple(self.random.randrange(5) for _ in range(count * BLOCK))
        names = []
        for at in range(count):
            whole = prefix + tokens[: (at + 1) * BLOCK]
            names.append(hash(whole) & ((1 << 64) - 1))
            self.blocks[names[-1]] = whole
        return stored(names, parent, tokens)


def stored(names: list[int], parent: int | None, tokens: Any, block: int = BLOCK, **more: Any) -> dict[str, Any]:
    told = {"block_hashes": names, "parent_block_hash": parent, "token_ids": list(tokens), "block_size": block}
    return {"type": "BlockStored", **told, "lora_id": None, "medium": "GPU", **more}


def batch(form: str, events: list[dict[str, Any]]) -> bytes:
    """Events in one of the three encodings."""
    if form == "A":
        return encode([1.5, [list(event.values()) for event in events], 0])
    if form == "B":
        return encode([1.5, events])
    return encode({"ts": 1.5, "events": events, "data_parallel_rank": 0})


class Reader:
    """What a gateway holds after the changes that a feed told."""

    def __init__(self) -> None:
        self.feed = Feed("p0", 0)
        self.keys: set[int] = set()

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case BlocksStored(worker, rank, block_tokens, keys):
                    assert (worker, rank, block_tokens) == ("p0", 0, BLOCK)
                    self.keys.update(keys)
                case BlocksRemoved(_, _, keys):
                    self.keys.difference_update(keys)
                case CacheCleared():
                    self.keys.clear()


@given(st.integers(0, 1 << 30), st.sampled_from("ABC"), st.sampled_from([1000, 5]))
def test_a_lossy_stream_ends_in_the_truth(seed: int, form: str, keeps: int) -> None:
    publisher, reader, random = Publisher(seed, form, keeps), Reader(), Random(seed)
    complete = keeps == 1000
    for _ in range(60):
        number, payload = publisher.step()
        if random.random() < 0.15:
            continue  # lost
        reader.take(reader.feed.hear(number, payload))
        if reader.feed.wants is not None and random.random() < 0.7:
            for again in publisher.replay(reader.feed.wants):
                reader.take(reader.feed.replayed(*again))
            reader.take(reader.feed.replay_ended())
        if random.random() < 0.05:  # the publisher dies and another takes its place
            publisher = Publisher(seed + 1, form, keeps)
    reader.feed.check()
    assert reader.feed.wants is not None
    for again in publisher.replay(reader.feed.wants):
        reader.take(reader.feed.replayed(*again))
    reader.take(reader.feed.replay_ended())
    if complete and reader.feed.last == len(publisher.sent) - 1:
        assert reader.keys == publisher.keys()
    assert reader.feed.counts.malformed == 0


def test_without_a_replay_a_gap_empties_the_cache() -> None:
    publisher, reader = Publisher(1, "B"), Reader()
    for _ in range(20):
        reader.take(reader.feed.hear(*publisher.step()))
    assert reader.keys == publisher.keys()
    publisher.step()
    reader.take(reader.feed.hear(*publisher.step()))
    assert reader.feed.wants == 20
    reader.take(reader.feed.replay_ended())
    assert reader.feed.counts.lost == 1
    assert reader.keys < publisher.keys()


def test_a_number_that_goes_back_is_another_publisher() -> None:
    first, second, reader = Publisher(1, "A"), Publisher(2, "A"), Reader()
    for _ in range(10):
        reader.take(reader.feed.hear(*first.step()))
    for _ in range(5):
        reader.take(reader.feed.hear(*second.step()))
    assert reader.keys == second.keys()
    assert reader.feed.counts.restarts == 1


def test_a_replay_ahead_of_the_live_road_is_not_applied_twice() -> None:
    publisher, reader = Publisher(3, "C"), Reader()
    messages = [publisher.step() for _ in range(12)]
    for message in messages[:4]:
        reader.take(reader.feed.hear(*message))
    reader.take(reader.feed.hear(*messages[6]))
    for again in publisher.replay(4):
        reader.take(reader.feed.replayed(*again))
    reader.take(reader.feed.replay_ended())
    for message in messages[7:]:
        reader.take(reader.feed.hear(*message))
    assert reader.keys == publisher.keys()
    assert reader.feed.counts.restarts == 0
    assert reader.feed.counts.batches == 12


def test_a_cache_that_is_emptied_needs_no_history() -> None:
    publisher, reader = Publisher(4, "B"), Reader()
    for _ in range(10):
        publisher.step()
    reader.take(reader.feed.hear(*publisher.step()))
    assert reader.feed.wants == 0
    history = publisher.replay(0)
    for again in history[:3]:  # which takes its time
        reader.take(reader.feed.replayed(*again))
    publisher.blocks.clear()
    publisher.sent.append(batch("B", [{"type": "AllBlocksCleared"}]))
    reader.take(reader.feed.hear(len(publisher.sent) - 1, publisher.sent[-1]))
    reader.take(reader.feed.hear(*publisher.step()))
    assert reader.feed.wants is None
    assert reader.keys == publisher.keys()
    for again in history[3:]:
        assert reader.feed.replayed(*again) == []
    assert reader.feed.counts.lost == 0


def test_a_salt_that_names_the_event_empties_nothing() -> None:
    feed = Feed("p0", 0)
    told = feed.hear(0, batch("B", [stored([1], None, range(32))]))
    assert len(told) == 1
    payload = batch("B", [stored([2], None, range(32), extra_keys=[["AllBlocksCleared"]])])
    assert feed.hear(2, payload) == []
    assert feed.wants == 1


# ------------------------------------------------------------------------------------------ meaning


def heard(*events: dict[str, Any], form: str = "B") -> tuple[Feed, list[Change]]:
    feed = Feed("p0", 0)
    return feed, feed.hear(0, batch(form, list(events)))


def test_adapters_salts_and_media_are_part_of_a_prefix() -> None:
    tokens = list(range(64))
    _, plain = heard(stored([1, 2], None, tokens))
    _, salted = heard(stored([1, 2], None, tokens, extra_keys=[["pepper"], None]))
    _, lora = heard(stored([1, 2], None, tokens, lora_name="sql", extra_keys=[["sql", "pepper"], ["sql"]]))
    _, number = heard(stored([1, 2], None, tokens, lora_id=7))
    _, media = heard(stored([1, 2], None, tokens, extra_keys=[None, ["image hash"]]))
    found = [change.keys for (change,) in (plain, salted, lora, number, media) if isinstance(change, BlocksStored)]
    assert found[0] == block_keys(tokens)[1::2]
    assert found[1] == block_keys(tokens, salt="pepper")[1::2]
    assert found[2] == block_keys(tokens, lora="sql", salt="pepper")[1::2]
    assert found[3][0] not in {keys[0] for keys in found[:3]}
    assert found[4][0] == found[0][0]
    assert found[4][1] != found[0][1]


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (4, 1), (16, 1), (64, 4), (128, 8)])
def test_blocks_of_any_size_end_in_the_same_keys(block: int, stride: int) -> None:
    tokens = list(range(256))
    names = list(range(1, 256 // block + 1))
    feed = Feed("p0", 0)
    half = len(names) // 2
    first = feed.hear(0, batch("A", [stored(names[:half], None, tokens[: half * block], block)]))
    rest = feed.hear(1, batch("A", [stored(names[half:], names[half - 1], tokens[half * block :], block)]))
    keys = tuple(key for change in (*first, *rest) if isinstance(change, BlocksStored) for key in change.keys)
    assert keys == block_keys(tokens)[stride - 1 :: stride]
    gone = feed.hear(2, batch("A", [{"type": "BlockRemoved", "block_hashes": names[::-1]}]))
    assert isinstance(gone[0], BlocksRemoved)
    assert sorted(gone[0].keys) == sorted(keys)
    assert len(feed.translator) == 0


def test_signed_hashes_and_digests_are_names_too() -> None:
    feed = Feed("p0", 0)
    feed.hear(0, batch("A", [stored([-5], None, range(32)), stored([b"\x01" * 24 + b"\x02" * 8], -5, range(32))]))  # type: ignore[list-item]
    (gone,) = feed.hear(1, batch("B", [{"type": "BlockRemoved", "block_hashes": [0x0202020202020202]}]))
    assert isinstance(gone, BlocksRemoved)
    assert gone.keys == (block_keys([*range(32), *range(32)])[-1],)


def test_an_unknown_parent_is_skipped_and_counted() -> None:
    feed, changes = heard(stored([2], 1, range(32)), stored([3], None, range(32)))
    assert feed.translator.unknown_parents == 1
    assert len(changes) == 1


def test_blocks_that_are_not_of_the_whole_context_are_left_out() -> None:
    feed, changes = heard(
        stored([2], None, range(32), kv_cache_spec_kind="sliding_window"),
        stored([3], None, range(32), group_idx=1),
    )
    assert changes == []
    assert feed.counts.malformed == 0


def test_tiers_are_kept_apart() -> None:
    feed, changes = heard(stored([1], None, range(32)), stored([1], None, range(32), medium="CPU"))
    assert [c.tier for c in changes if isinstance(c, BlocksStored)] == [Tier.DEVICE, Tier.CPU]
    (gone,) = feed.hear(1, batch("B", [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}]))
    assert isinstance(gone, BlocksRemoved)
    assert gone.tier == Tier.DEVICE
    index = BlockIndex()
    index.add_holder("p0", 0, BLOCK)
    for change in (*changes, gone):
        if isinstance(change, BlocksStored):
            index.insert("p0", 0, change.keys, Tier(change.tier))
        elif isinstance(change, BlocksRemoved):
            index.remove("p0", 0, change.keys, Tier(change.tier))
    assert index.match(block_keys(range(32))) == {"p0": 24}


# ------------------------------------------------------------------------------------------ bad input


GARBAGE: list[bytes] = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff\x01",
    b"\x91" * 100_000,
    encode("text"),
    encode([1.0]),
    encode([1.0, 5]),
    encode({"ts": 1}),
]


@pytest.mark.parametrize("payload", GARBAGE)
def test_a_message_that_makes_no_sense_empties_the_cache(payload: bytes) -> None:
    feed, _ = heard(stored([1], None, range(32)))
    assert feed.hear(1, payload) == [CacheCleared("p0", 0)]
    assert feed.counts.malformed == 1
    assert len(feed.hear(2, batch("A", [stored([1], None, range(32))]))) == 1


BAD_EVENTS: list[Any] = [
    5,
    None,
    [],
    ["BlockStored"],
    {"no": "type"},
    stored([1], None, range(31)),
    stored([1], None, range(32), block=0),
    stored(["x"], None, range(32)),  # type: ignore[list-item]
    stored([1], None, [-1] * 32),
    stored([1], None, [1 << 40] * 32),
    stored([1], None, ["a"] * 32),
    stored([1], None, range(32), extra_keys=[["a"], ["b"]]),
    {"type": "BlockRemoved", "block_hashes": 5},
    {"type": "BlockRemoved"},
]


@pytest.mark.parametrize("event", BAD_EVENTS)
def test_an_event_that_makes_no_sense_is_left_out(event: Any) -> None:
    feed = Feed("p0", 0)
    changes = feed.hear(0, encode([1.0, [event, stored([9], None, range(32))]]))
    assert len(changes) == 1
    assert feed.counts.malformed == 1


def test_unknown_events_and_fields_are_ignored() -> None:
    feed, changes = heard({"type": "Compacted"}, stored([9], None, range(32), new_field={"a": 1}))
    assert len(changes) == 1
    assert feed.counts.malformed == 0


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(payload: bytes) -> None:
    feed = Feed("p0", 0)
    feed.hear(0, payload)
    feed.hear(7, payload)
    feed.replay_ended()


def test_a_cache_larger_than_what_is_followed_is_learned_anew() -> None:
    feed = Feed("p0", 0, Translator(max_blocks=10))
    for number in range(30):
        feed.hear(number, batch("B", [stored([number + 1], None, [number] * 32)]))
        assert len(feed.translator) <= 10
    assert feed.counts.overflows == 2


def test_what_is_held_during_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_HELD", 5)
    feed = Feed("p0", 0)
    for number in range(1, 20):
        feed.hear(number, batch("B", []))
    assert feed.counts.overflows == 1
    assert feed.last == 19
