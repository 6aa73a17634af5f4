"""One simulated worker: continuous batching with chunked prefill, prefix cache, KV capacity and preemption. Pure.

The engine works in steps. Between two changes of its batch all decode steps follow one formula, so it takes them in one
run and cuts the run short, at the end of a step, when something comes in:

    submit ──► waiting ──► prefilling ──► running ──► finished       a prompt is computed here
                  │            │  ▲          │ ▲
                  │            ▼  └─ no room ┘ │
                  │      held for a pull       │                     ... and handed over (a P leg)
                  └──► pulling ────────────────┘                     its KV comes from another worker (a D leg)

It knows neither gateways nor networks: whoever drives it asks `wake_at`, calls `advance` then, and hears notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from omni_proxy.sim.block_cache import BlockCache, Removed
from omni_proxy.sim.engine_model import EngineModel, pairs
from omni_proxy.sim.engine_step import EngineCounters, Step
from omni_proxy.sim.finishes import Finishes
from omni_proxy.sim.job import Job, Where
from omni_proxy.sim.notices import Notice, Notices

Stored = Callable[[Job, list[int]], None]


class Engine:
    """One worker. `on_stored` and `on_removed` hear of blocks as an engine's KV events would tell."""

    def __init__(
        self,
        model: EngineModel,
        max_seqs: int,
        block_tokens: int,
        on_stored: Stored,
        on_removed: Removed,
        every_token: bool = False,
    ) -> None:
        self.model = model
        self.max_seqs = max_seqs
        self.cache = BlockCache(model.kv_capacity_tokens, block_tokens, on_removed)
        self.counters = EngineCounters()
        self._on_stored = on_stored
        self._every_token = every_token
        self._waiting: deque[Job] = deque()
        self._prefilling: dict[Job, None] = {}
        self._pulling: dict[Job, None] = {}
        self._ready: list[Job] = []
        """Pulled, to join at the next step."""
        self._running: dict[Job, None] = {}
        self._held: dict[Job, None] = {}
        """P legs whose KV waits for a pull."""
        self._newcomers = 0
        """Running jobs without a first token."""
        self._kv_running = 0
        """Context of all running jobs, in tokens."""
        self._finishes = Finishes()
        self._passes = 0
        """Decode passes since the beginning; a running job has made one token in each."""
        self._serial = 0
        self._step: Step | None = None
        self._notices: Notices = []

    # --------------------------------------------------------------------- questions

    @property
    def wake_at(self) -> float | None:
        """The end of what is under way, or None when idle."""
        return None if self._step is None else self._step.end

    @property
    def running(self) -> int:
        """Jobs that are computed or hold room for a pull."""
        return len(self._running) + len(self._prefilling) + len(self._pulling) + len(self._ready)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # ----------------------------------------------------------------------- ways in

    def submit(self, job: Job, now: float) -> Notices:
        """Take a job in; it is looked at when the step under way ends."""
        assert self.can_ever_hold(job), f"{job.rid} can never fit"
        job.where = Where.WAITING
        self._waiting.append(job)
        return self._changed(now)

    def can_ever_hold(self, job: Job) -> bool:
        """Would the job fit into an empty worker?"""
        tokens = job.prompt_tokens + (0 if job.keep_kv else job.output_tokens)
        return tokens <= self.model.kv_capacity_tokens

    def pulled(self, job: Job, now: float) -> Notices:
        """A job's KV has arrived."""
        if job.where is not Where.PULLING:
            return []
        del self._pulling[job]
        job.where = Where.READY
        self.counters.pulled_tokens += job.target - job.cached_tokens
        self._store(job, job.target)
        job.computed = job.target
        self._ready.append(job)
        return self._changed(now)

    def release(self, job: Job, now: float) -> Notices:
        """A held job's KV was pulled, or will not be."""
        if job.where is not Where.HELD:
            return []
        self._free(job)
        return self._changed(now) if self._waiting else []

    def abort(self, job: Job, now: float) -> Notices:
        """Forget a job in whatever state it is; nothing more is told of it."""
        match job.where:
            case Where.GONE:
                return []
            case Where.NEW:
                job.where = Where.GONE
                return []
            case Where.WAITING:
                self._waiting.remove(job)
                job.where = Where.GONE
            case Where.PREFILLING:
                del self._prefilling[job]
                self._free(job)
            case Where.PULLING:
                del self._pulling[job]
                self._free(job)
            case Where.READY:
                self._ready.remove(job)
                self._free(job)
            case Where.RUNNING:
                # It stays in the pass that is under way and leaves at its end.
                job.aborted = True
            case Where.HELD:
                self._free(job)
        return self._changed(now)

    def die(self, now: float) -> None:
        """Lose every job and every block; jobs keep the tokens that they had made, counters what they counted."""
        step, self._step = self._step, None
        if step is not None:
            self.counters.busy_s += now - step.begin
            done = min(step.count, int(step.passes_by(now) + 1e-9))
            for job in self._running:
                job.generated += self._passes + done - job.joined_pass
        for job in (*self._waiting, *self._prefilling, *self._pulling, *self._ready, *self._running, *self._held):
            job.where = Where.GONE
        for jobs in (self._prefilling, self._pulling, self._running, self._held):
            jobs.clear()
        self._waiting.clear()
        self._ready.clear()
        self._finishes.clear()
        self._newcomers = self._kv_running = 0
        self.cache.lose()

    def advance(self, now: float) -> Notices:
        """End the step whose time has come and begin the next."""
        step = self._step
        assert step is not None
        assert now >= step.end, "a step ended too early"
        self._step = None
        self._notices = []
        self._end(step)
        self._begin(now)
        return self._notices

    # ------------------------------------------------------------------- steps' begin

    def _changed(self, now: float) -> Notices:
        """Something came in: begin at once when idle, else at the end of the pass under way."""
        self._notices = []
        if self._step is None:
            self._begin(now)
        elif self._step.count > 1:
            self._step.cut(now)
        return self._notices

    def _begin(self, now: float) -> None:
        for job in self._ready:
            self._join(job)
        self._ready.clear()
        chunks = self._take_chunks()
        runs = self._passes_in_a_row(chunks)
        seqs = len(self._running)
        if not chunks and not seqs:
            return
        model = self.model
        tokens = sum(count for _, count in chunks)
        work = sum(pairs(count, job.computed) for job, count in chunks)
        first_s = model.step_s + model.prefill_s(tokens, work) + model.decode_step_s(seqs, self._kv_running)
        step = Step(now, 0.0, runs, first_s, model.kv_s * seqs, chunks)
        step.end = now + step.run_s(runs)
        self._step = step

    def _take_chunks(self) -> list[tuple[Job, int]]:
        """Which part of which prompt is computed in this pass: begun prompts first, then waiting ones."""
        budget = self.model.max_batch_tokens - len(self._running)
        chunks: list[tuple[Job, int]] = []
        for job in self._prefilling:
            if budget <= 0:
                return chunks
            count = min(job.target - job.computed, budget)
            chunks.append((job, count))
            budget -= count
        while self._waiting and budget > 0 and self.running < self.max_seqs:
            job = self._waiting[0]
            if not self._admit(job):
                break
            self._waiting.popleft()
            if job.where is Where.PULLING:
                continue
            count = min(job.target - job.computed, budget)
            chunks.append((job, count))
            budget -= count
        return chunks

    def _admit(self, job: Job) -> bool:
        """Take memory for the whole prompt, as far as it is not here; False when there is no room."""
        block = self.cache.block_tokens
        # At least one token of a prompt is computed anew, or nothing would follow from it.
        most = job.target // block if job.pull else (job.target - 1) // block
        matched = self.cache.match(job.keys[:most])
        private = job.target - matched * block
        if not job.pull and not job.keep_kv:
            private += 1  # the token that the last pass of the prompt makes
        if not self.cache.admit(job.keys[:matched], private):
            return False
        job.admitted(matched, matched * block, private)
        self.counters.prompt_tokens += job.target
        self.counters.cached_tokens += matched * block
        self._note_peak()
        if job.pull:
            job.pull = False
            job.where = Where.PULLING
            self._pulling[job] = None
            self._notices.append((Notice.PULL, job))
        else:
            job.where = Where.PREFILLING
            self._prefilling[job] = None
        return True

    def _passes_in_a_row(self, chunks: list[tuple[Job, int]]) -> int:
        """How many passes the batch stays as it is; makes room for one pass by preemption where needed."""
        while self._running and self.cache.room_tokens < len(self._running):
            self._preempt(chunks)
        if chunks or not self._running or self._newcomers or self._every_token:
            return 1
        ends_in = self._finishes.first() - self._passes
        return max(1, min(ends_in, self.cache.room_tokens // len(self._running)))

    def _preempt(self, chunks: list[tuple[Job, int]]) -> None:
        """Put the youngest job back to wait; it computes its context anew."""
        victim = max((*self._prefilling, *self._running), key=lambda job: job.serial)
        if victim.where is Where.RUNNING:
            self._leave(victim)
        else:
            del self._prefilling[victim]
            chunks[:] = [chunk for chunk in chunks if chunk[0] is not victim]
        self._free(victim)
        self.counters.preemptions += 1
        victim.start_again()
        self._waiting.appendleft(victim)

    # --------------------------------------------------------------------- steps' end

    def _end(self, step: Step) -> None:
        counters = self.counters
        spent, seqs = step.end - step.begin, len(self._running)
        counters.busy_s += spent
        counters.steps += step.count
        if seqs:
            counters.decode_busy_s += spent
            counters.decode_seq_s += spent * seqs
            self._end_decode(step.count)
        if step.chunks:
            counters.prefill_busy_s += spent
            for job, count in step.chunks:
                if job.where is Where.PREFILLING:
                    self._end_chunk(job, count)

    def _end_decode(self, count: int) -> None:
        running = self._running
        made = count * len(running)
        self._passes += count
        self._kv_running += made
        self.cache.take(made)
        self.counters.generated_tokens += made
        self._note_peak()
        if self._every_token:
            self._tell_every_token()
        elif self._newcomers:
            self._tell_first_tokens()
        self._newcomers = 0
        for job in [job for job in running if job.aborted]:
            self._leave(job)
            self._free(job)
        while (ended := self._finishes.take(self._passes)) is not None:
            self._leave(ended)
            self._finish(ended)

    def _tell_every_token(self) -> None:
        for job in self._running:
            if not job.aborted:
                self._notices.append((Notice.TOKEN if job.told_first else Notice.FIRST, job))
                job.told_first = True

    def _tell_first_tokens(self) -> None:
        for job in reversed(self._running):  # newcomers joined last
            if job.joined_pass < self._passes - 1:
                break
            if not job.told_first and not job.aborted:
                job.told_first = True
                self._notices.append((Notice.FIRST, job))

    def _end_chunk(self, job: Job, count: int) -> None:
        self.counters.prefill_tokens += count
        job.computed += count
        self._store(job, job.computed)
        if job.computed < job.target:
            return
        del self._prefilling[job]
        if job.keep_kv:
            job.where = Where.HELD
            self._held[job] = None
            self.counters.finished += 1
            self._notices.append((Notice.PREFILLED, job))
            return
        self._first_by_prefill(job)

    def _first_by_prefill(self, job: Job) -> None:
        """The pass that ends a prompt makes the next token of its answer, too."""
        job.generated += 1
        self.counters.generated_tokens += 1
        job.where = Where.READY
        told, job.told_first = job.told_first, True
        if not told:
            self._notices.append((Notice.FIRST, job))
        elif self._every_token:
            self._notices.append((Notice.TOKEN, job))
        if job.generated >= job.output_tokens:
            self._finish(job)
        else:
            self._ready.append(job)

    # -------------------------------------------------------------------- bookkeeping

    def _join(self, job: Job) -> None:
        self._serial += 1
        job.where = Where.RUNNING
        job.joined_serial = self._serial
        job.joined_pass = self._passes
        self._running[job] = None
        self._kv_running += job.prompt_tokens + job.generated
        if not job.told_first:
            self._newcomers += 1
        self._finishes.add(self._passes + job.output_tokens - job.generated, job)

    def _leave(self, job: Job) -> None:
        """Out of the batch, with the tokens made in it counted."""
        del self._running[job]
        made = self._passes - job.joined_pass
        job.generated += made
        job.private += made
        self._kv_running -= job.prompt_tokens + job.generated

    def _finish(self, job: Job) -> None:
        self.counters.finished += 1
        self._free(job)
        self._notices.append((Notice.FINISHED, job))

    def _free(self, job: Job) -> None:
        self._held.pop(job, None)
        self.cache.release(job.keys[: job.pinned])
        self.cache.give(job.private)
        job.pinned = job.private = 0
        job.where = Where.GONE

    def _store(self, job: Job, tokens: int) -> None:
        """Make the full blocks among a job's first `tokens` shareable."""
        full = min(tokens // self.cache.block_tokens, len(job.keys))
        if full <= job.pinned:
            return
        keys = job.keys[job.pinned : full]
        new = self.cache.store(keys)
        job.private -= len(keys) * self.cache.block_tokens
        job.pinned = full
        if new:
            self._on_stored(job, new)

    def _note_peak(self) -> None:
        self.counters.kv_peak_tokens = max(self.counters.kv_peak_tokens, self.cache.used_tokens)
