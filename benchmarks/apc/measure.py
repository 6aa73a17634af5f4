"""Times and sizes of the parts: keys, index, tokenising a conversation's next turn, mending a feed."""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from omni_proxy.apc.block_index import BlockIndex
from omni_proxy.apc.caches import Caches
from omni_proxy.apc.index import Tier
from omni_proxy.apc.keys import block_keys, token_bytes
from omni_proxy.apc.recency import RecencyModel
from omni_proxy.apc.translate import Translator
from omni_proxy.apc.wire import Stored
from omni_proxy.messages import Role, WorkerSpec
from omni_proxy.prompts.chat_template import load_chat_template
from omni_proxy.prompts.segments import SegmentEncoder
from omni_proxy.prompts.text_tokenizer import encode, load_tokenizer
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.kv_events import KvEvents, Source

PROMPT_BLOCKS: Final = 1000
HOLDERS: Final = 32


def median_us(work: Callable[[], object], rounds: int = 51) -> float:
    """Median wall time of a call, in microseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def key_chain_us() -> float:
    """Keys of a prompt of 1,000 units."""
    tokens = [Random(1).randrange(150_000) for _ in range(16 * PROMPT_BLOCKS)]
    return median_us(lambda: block_keys(tokens))


class Filled:
    """An index of many keys over 32 workers: conversations of 1,000 blocks, a third of whose prefixes are shared."""

    def __init__(self, keys: int, seed: int = 1) -> None:
        random = Random(seed)
        self.index = BlockIndex()
        self.names = [f"p{n:02d}" for n in range(HOLDERS)]
        for name in self.names:
            self.index.add_holder(name, 0, 16)
        self.prompts: list[list[int]] = []
        total = 0
        while total < keys:
            shared = self.prompts[random.randrange(len(self.prompts))][:333] if self.prompts else []
            own = [random.getrandbits(64) for _ in range(PROMPT_BLOCKS - len(shared))]
            prompt = [*shared, *own]
            total += len(own)
            self.index.insert(random.choice(self.names), 0, prompt)
            self.prompts.append(prompt)


def match_us(filled: Filled, seed: int = 2) -> tuple[float, float]:
    """Median and 99th percentile of a match of 1,000 held blocks; prompts come in random order, so caches are cold."""
    random, times = Random(seed), []
    for _ in range(400):
        prompt = [key ^ 0 for key in random.choice(filled.prompts)]  # as a tokenizer makes them: objects of their own
        begin = time.perf_counter()
        found = filled.index.match(prompt)
        times.append(time.perf_counter() - begin)
        assert max(found.values()) == 16 * PROMPT_BLOCKS
    times.sort()
    return statistics.median(times) * 1e6, times[int(0.99 * len(times))] * 1e6


def shared_match_us(holders: int = HOLDERS) -> float:
    """The same where all workers hold the prompt, each a block less than the one before it."""
    index, keys = BlockIndex(), [Random(3).getrandbits(64) for _ in range(PROMPT_BLOCKS)]
    for number in range(holders):
        index.add_holder(f"p{number:02d}", 0, 16)
        index.insert(f"p{number:02d}", 0, keys[: PROMPT_BLOCKS - number])
    return median_us(lambda: index.match(keys))


def index_bytes(keys: int) -> dict[str, float]:
    """Bytes for each key: of the index alone, with what an event feed keeps, and with the model of a silent worker."""
    random = Random(4)
    tracemalloc.start()
    index = BlockIndex()
    for number in range(HOLDERS):
        index.add_holder(f"p{number:02d}", 0, 16)
    before, _ = tracemalloc.get_traced_memory()
    translators = [Translator() for _ in range(HOLDERS)]
    tokens = token_bytes(range(16))
    count = 0
    while count < keys:
        number = count % HOLDERS
        names = tuple(random.getrandbits(64) for _ in range(100))
        data = b"".join(random.getrandbits(32).to_bytes(4, "little") + tokens[4:] for _ in names)
        event = Stored(names, None, 16, data, None, (), Tier.DEVICE)
        index.insert(f"p{number:02d}", 0, translators[number].stored(event))
        count += len(names)
    with_feed, _ = tracemalloc.get_traced_memory()
    translators.clear()
    alone, _ = tracemalloc.get_traced_memory()
    held = list(index._tiers[0])
    empty, _ = tracemalloc.get_traced_memory()
    models = [RecencyModel(keys) for _ in range(HOLDERS)]
    for at, key in enumerate(held):
        models[at % HOLDERS].use((key,))
    with_model, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = len(index)
    return {
        "index": (alone - before) / size,
        "with an event feed": (with_feed - before) / size,
        "with a model of what was sent": (alone - before + with_model - empty) / size,
    }


def next_turn(folder: Path) -> tuple[float, float, int]:
    """CPU seconds of reading the next turn of a 30 KB conversation, and of encoding it whole; its characters."""
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    assert template is not None
    ratios: list[tuple[float, float, int]] = []
    for seed in range(9):
        random = Random(seed)
        chat = [{"role": ("user", "assistant")[t % 2], "content": _prose(random, 1500)} for t in range(21)]
        encoder = SegmentEncoder(tokenizer)
        encoder.encode(template.render(chat))
        chat += [
            {"role": "assistant", "content": _prose(random, 300)},
            {"role": "user", "content": _prose(random, 200)},
        ]
        begin = time.process_time()
        text = template.render(chat)
        ids = encoder.encode(text)
        middle = time.process_time()
        whole = encode(tokenizer, text, False)
        ratios.append((middle - begin, time.process_time() - middle, len(text)))
        assert list(ids) == whole
    return sorted(ratios, key=lambda r: r[0] / r[1])[len(ratios) // 2]


def _prose(random: Random, chars: int) -> str:
    """Words as rare as those of real text: BPE's own cache of words must not make either side cheap."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = range(26, 0, -1)
    words = ("".join(random.choices(letters, weights, k=random.randrange(2, 9))) for _ in range(chars // 4))
    return " ".join(words)[:chars]


async def mending_s() -> dict[str, float]:
    """Seconds until the index is right again after a lost last message, and after a publisher that came back."""
    caches = Caches()
    caches.member(WorkerSpec("p0", Role.PREFILL))
    events = KvEvents(caches.heard)
    publisher = KvEventPublisher("127.0.0.1", 0)
    publisher.start()
    events.set("p0", [_source(publisher)])
    result = {"first connection": await _until_right(caches, publisher, 1)}
    (subscription,) = events.subscriptions()
    subscription.feed.hear = lambda number, payload: []  # type: ignore[method-assign]
    result["a message that was lost, none after it"] = await _until_right(caches, publisher, 2)
    del subscription.feed.hear
    port = int(publisher.endpoint.rpartition(":")[2])
    publisher.stop()
    begin = time.perf_counter()
    publisher = KvEventPublisher("127.0.0.1", port)
    publisher.start()
    events.set("p0", [_source(publisher)])
    await _until_right(caches, publisher, 3)
    result["a publisher killed and started again"] = time.perf_counter() - begin
    await events.close()
    publisher.stop()
    return result


def _source(publisher: KvEventPublisher) -> Source:
    told = publisher.source()
    return Source("p0", told["endpoint"], told["replay_endpoint"])


async def _until_right(caches: Caches, publisher: KvEventPublisher, seed: int) -> float:
    tokens = [Random(seed).randrange(1000) for _ in range(160)]
    names = [Random(seed * 100 + n).getrandbits(63) for n in range(10)]
    stored = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens}
    publisher.send(msgspec.msgpack.encode([0.0, [{**stored, "block_size": 16}], 0]))
    keys, begin = block_keys(tokens), time.perf_counter()
    while caches.match(keys) != {"p0": 160}:  # noqa: ASYNC110 - nobody would tell
        await asyncio.sleep(0.005)
    return time.perf_counter() - begin
