"""Replays a trace against workers with bounded caches, in simulated time, and compares predictions with reports.

The gateway's half is the real one: tokenizer, block keys, core, index, feeds that read the published bytes. The
workers' half is the embedded engine's own bookkeeping (its planner and block pool); only the time that a step takes is
made up. So a prediction meets what it meets in service: admissions in the middle of a batch, evictions, pinned blocks.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from omni_proxy.apc.feed import Feed
from omni_proxy.call import COMPLETIONS, Call, parse_call
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import (
    Abort,
    Arrived,
    Close,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    Lease,
    Leg,
    LegSent,
    Mode,
    PrefillDone,
    RequestRecord,
    RequestSpec,
    Role,
    StartDecode,
    StartPrefill,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerSpec,
    WorkerUp,
)
from omni_proxy.sim.traces import MOONCAKE_BLOCK_TOKENS, read_trace
from omni_proxy.sim.workload import SimRequest
from omni_proxy.tokenizer import PromptTokenizer
from omni_proxy.workers.engine.blocks import BlockPool
from omni_proxy.workers.engine.cache_log import CacheLog
from omni_proxy.workers.engine.planner import Planner
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence
from omni_proxy.workers.engine.types import EngineRequest, SamplingParams

BLOCK: Final = MOONCAKE_BLOCK_TOKENS
STEP_S: Final = 0.01
TOKEN_S: Final = 1e-4
"""Ten thousand prompt tokens a second."""
EVENT_DELAY_S: Final = 0.002
PULL_S: Final = 0.05
ANSWER_TOKEN_S: Final = 0.02
WORDS: Final = 4096


@dataclass(frozen=True)
class Setting:
    """One replay. Sizes in tokens."""

    workers: int = 6
    cache_tokens: int = 512 * 1024
    """Of each worker, pinned blocks included."""
    minutes: float = 20.0
    events: bool = True
    text: bool = False
    """Prompts are texts that are tokenised; else token ids, which saves nine tenths of the time."""
    seed: int = 1


@dataclass
class Result:
    """What came out; a request counts when its prompt was computed."""

    requests: int = 0
    exact: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    prompt_tokens: int = 0
    off: list[tuple[int, int]] = field(default_factory=list)
    """Prediction and report where they differ."""

    @property
    def exact_share(self) -> float:
        return self.exact / max(self.requests, 1)

    def take(self, record: RequestRecord) -> None:
        predicted, reported = record.predicted_tokens, record.cached_tokens
        if predicted is None or reported is None:
            return
        self.requests += 1
        self.exact += predicted == reported
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        self.prompt_tokens += record.prompt_tokens
        if predicted != reported:
            self.off.append((predicted, reported))


class Prompts:
    """A trace's prompts: each block id is 512 seeded tokens, or as many words that are one token each."""

    def __init__(self, seed: int, text: bool) -> None:
        self._seed = seed
        self._text = text
        self._words = [_word(number) for number in range(WORDS)]
        self.tokenizer = PromptTokenizer(_tokenizer(self._words), None)
        self._blocks: dict[int, str] = {}
        self._ids: dict[int, array[int]] = {}

    def call(self, request: SimRequest) -> Call:
        """The request as a client would send it."""
        prompt = self._words_of(request) if self._text else self._ids_of(request)
        return parse_call(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": prompt}))

    def _ids_of(self, request: SimRequest) -> list[int]:
        whole = array("H")
        for key in request.block_keys:
            if key not in self._ids:
                self._ids[key] = array("H", Random(self._seed * 1_000_003 + key).randbytes(2 * BLOCK))
            whole += self._ids[key]
        return whole[: request.prompt_tokens].tolist()

    def _words_of(self, request: SimRequest) -> str:
        text = "".join(self._block(key) for key in request.block_keys[:-1])
        rest = request.prompt_tokens - (len(request.block_keys) - 1) * BLOCK
        return text + _first_words(self._block(request.block_keys[-1]), rest)

    def _block(self, key: int) -> str:
        text = self._blocks.get(key)
        if text is None:
            random = Random(self._seed * 1_000_003 + key)
            text = self._blocks[key] = "".join(" " + word for word in random.choices(self._words, k=BLOCK))
        return text


def _word(number: int) -> str:
    letters = "abcdefghijklmnop"
    return "".join(letters[(number >> shift) & 15] for shift in (8, 4, 0))


def _first_words(text: str, count: int) -> str:
    return text[: 4 * count]  # each word is a space and three letters


def _tokenizer(words: Sequence[str]) -> Tokenizer:
    """A byte-level BPE whose tokens are bytes, pairs on the way, and " word"."""
    space = "\u0120"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(alphabet))}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        parts = [space + word[0], space + word[:2], space + word]
        for left, right in zip([space, *parts], word, strict=False):
            merges[left, right] = None
            vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Worker:
    """A prefill worker: the engine's planner over its block pool, one step after another."""

    def __init__(self, name: str, world: World, setting: Setting) -> None:
        self.name = name
        self._world = world
        self._log = CacheLog(BLOCK) if setting.events else None
        self._pool = BlockPool(setting.cache_tokens // BLOCK, BLOCK, listener=self._log)
        self._planner = Planner(self._pool, max_num_seqs=32, max_num_batched_tokens=8192)
        self._feed = Feed(name, 0)
        self._number = 0
        self._leases: dict[str, Lease] = {}
        self._busy = False

    def submit(self, lease: Lease, token_ids: Sequence[int]) -> None:
        request = EngineRequest(lease.rid, tuple(token_ids), SamplingParams(1, ignore_eos=True), keep_kv=True)
        self._leases[lease.rid] = lease
        self._planner.add(EngineSequence(request, BLOCK))
        self._wake()

    def pulled(self, rid: str) -> None:
        """D has taken the KV over."""
        self._pool.unpin(rid)
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._world.at(0.0, self._step)

    def _step(self) -> None:
        plan = self._planner.plan()
        self._tell()
        if not plan.chunks:
            self._busy = False
            return
        tokens = sum(chunk.count for chunk in plan.chunks)

        def done() -> None:
            for chunk in plan.chunks:
                self._planner.advance(chunk, 1 if chunk.samples else None)
                if chunk.samples:
                    self._finish(chunk.seq)
            self._tell()
            self._step()

        self._world.at(STEP_S + tokens * TOKEN_S, done)

    def _finish(self, seq: EngineSequence) -> None:
        self._planner.remove(seq.request_id, pin_prompt=True)
        lease = self._leases.pop(seq.request_id)
        self._world.tell(PrefillDone(lease, True, usage=Usage(seq.prompt_len, 1, seq.cached_tokens)))

    def _tell(self) -> None:
        """Publish what the cache did, as bytes; the gateway reads them a moment later."""
        batch = self._log.take(self._world.now) if self._log is not None else None
        if batch is not None:
            changes = self._feed.hear(self._number, batch)
            self._number += 1
            self._world.at(EVENT_DELAY_S, partial(self._world.tell_all, changes))


class World:
    """The clock, the core, and who carries its effects out."""

    def __init__(self, setting: Setting, prompts: Prompts) -> None:
        self.now = 0.0
        self.result = Result()
        self._prompts = prompts
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._core = Core(CoreSettings(schedule_mode=Mode.SEQUENTIAL, prefix_aware=True, queue_timeout_s=1e6))
        self._workers = {f"p{n}": Worker(f"p{n}", self, setting) for n in range(setting.workers)}
        self._calls: dict[str, tuple[Call, Sequence[int], int]] = {}
        for name in self._workers:
            self.tell(WorkerUp(_spec(name, Role.PREFILL, setting.cache_tokens)))
        self.tell(WorkerUp(WorkerSpec("d0", Role.DECODE, modes=(Mode.SEQUENTIAL,), max_seqs=1_000_000)))

    def at(self, delay_s: float, action: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, action))

    def run(self, requests: Sequence[SimRequest]) -> Result:
        """All requests, from arrival to end."""
        for number, request in enumerate(requests):
            self.at(request.arrival_s, partial(self._arrive, number, request))
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self._core.check()
        return self.result

    def _arrive(self, number: int, request: SimRequest) -> None:
        rid = f"r{number}"
        call = self._prompts.call(request)
        self._calls[rid] = (call, (), request.output_tokens)
        spec = RequestSpec("m", COMPLETIONS, request.prompt_tokens, request.output_tokens, tokenize=True)
        self.tell(Arrived(rid, spec))

    def tell_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self.tell(event)

    def tell(self, event: Event) -> None:
        inbox: list[Event] = [event]
        for following in inbox:
            for effect in self._core.handle(following, self.now):
                self._perform(effect, inbox)
        wake = self._core.next_wakeup()
        if wake is not None and wake < 1e5:
            self.at(max(0.0, wake - self.now), lambda: self.tell(Tick()))

    def _perform(self, effect: Effect, inbox: list[Event]) -> None:
        match effect:
            case Tokenize(rid):
                call, _, output = self._calls[rid]
                read = self._prompts.tokenizer.read(call)
                assert read is not None
                assert read.ids is not None
                self._calls[rid] = (call, read.ids, output)
                inbox.append(Tokenized(rid, read.count, read.keys))
            case StartPrefill(lease):
                self._workers[lease.worker].submit(lease, self._calls[lease.rid][1])
                inbox.append(LegSent(lease))
            case StartDecode(lease, peer):
                assert lease.leg is Leg.DECODE
                assert peer is not None
                self.at(PULL_S, lambda: self._first_token(lease, peer))
                self.at(PULL_S + ANSWER_TOKEN_S * self._calls[lease.rid][2], lambda: self.tell(DecodeDone(lease)))
            case Close(rid, record=record):
                self.result.take(record)
                del self._calls[rid]
            case Abort():
                raise AssertionError("nothing fails here")

    def _first_token(self, lease: Lease, peer: str) -> None:
        self._workers[peer].pulled(lease.rid)
        self.tell(FirstToken(lease))


def _spec(name: str, role: Role, cache_tokens: int) -> WorkerSpec:
    return WorkerSpec(
        name,
        role,
        modes=(Mode.SEQUENTIAL,),
        kv_capacity_tokens=cache_tokens,
        block_tokens=BLOCK,
        max_batch_tokens=16_384,
    )


def replay(trace: Path, setting: Setting) -> Result:
    """Replay the first minutes of a Mooncake trace."""
    requests = [r for r in read_trace(trace).requests if r.arrival_s < setting.minutes * 60]
    return World(setting, Prompts(setting.seed, setting.text)).run(requests)
