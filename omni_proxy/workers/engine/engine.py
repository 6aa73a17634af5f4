"""The engine: one thread that takes requests in, plans, runs and hands tokens out.

Everything that changes sequences or blocks happens in that thread; other threads only put commands into its inbox.
Knows nothing of HTTP, text or JSON.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from omni_proxy.workers.engine.arrivals import Arrivals
from omni_proxy.workers.engine.assembly import DTYPES, expert_parallel, publisher, runner_of
from omni_proxy.workers.engine.blocks import BlockPool
from omni_proxy.workers.engine.bursts import Bursts
from omni_proxy.workers.engine.cache_log import CacheLog
from omni_proxy.workers.engine.counters import Counters, read_stats
from omni_proxy.workers.engine.draft_checkpoint import load_with_head
from omni_proxy.workers.engine.drafting import drafter_of
from omni_proxy.workers.engine.expert_parallel.wire import RankLost
from omni_proxy.workers.engine.handoff import Transfers
from omni_proxy.workers.engine.outputs import output_of, say
from omni_proxy.workers.engine.planner import Planner
from omni_proxy.workers.engine.sampler import Drawn
from omni_proxy.workers.engine.sequence import Sequence, finish_reason
from omni_proxy.workers.engine.sizing import block_bytes, engine_info, kv_layout
from omni_proxy.workers.engine.stepper import Outlet, Stepper
from omni_proxy.workers.engine.types import (
    Emit,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    InvalidRequest,
    Output,
)
from omni_proxy.workers.engine.validate import check_config, check_request
from omni_proxy.workers.engine.waits import Waits

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 10.0
_RESET_TIMEOUT_S: Final = 30.0


class Engine:
    """One model, one KV cache, one thread. Public methods may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the checkpoint and bind the side channel. Raises CheckpointError, ValueError or OSError."""
        check_config(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = load_with_head(config.model, DTYPES[config.dtype], config.speculation == "head", config.draft_model)
        checkpoint, _ = loaded
        sizes = engine_info(config, checkpoint.config, side_channel_port=0)
        self.config = config
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._experts = expert_parallel(config, checkpoint, on_lost=lambda: self._inbox.put(lambda: None))
        self._runner = runner_of(config, loaded, sizes, self._experts)
        self._events = publisher(config)
        self._log = None if self._events is None else CacheLog(sizes.block_size)
        self._pool = BlockPool(sizes.num_blocks, sizes.block_size, config.prefix_caching, self._log)
        self._drafter = drafter_of(config, sizes.max_model_len)
        self._bursts = Bursts(config.burst_steps if self._runner.bursts else 1, sizes.max_model_len)
        limits = config.max_num_seqs, config.max_num_batched_tokens
        self._planner = Planner(self._pool, *limits, self._drafter, self._bursts)
        self._transfers = Transfers(
            config,
            kv_layout(config, checkpoint),
            block_bytes(config, checkpoint.config),
            self._runner,
            on_lease_ended=lambda rid: self._inbox.put(lambda: self._release_or_unpin(rid)),
            on_pull_ended=lambda pull: self._inbox.put(lambda: self._arrivals.ended(pull)),
        )
        self.info: EngineInfo = engine_info(config, checkpoint.config, self._transfers.server.port)
        self._counters = Counters()
        outlet = Outlet(self._end_of, self._emit, self._finish)
        steps = self._runner, self._planner, self._transfers.pusher, self._counters, self._bursts, self._drafter
        self._stepper = Stepper(*steps, outlet)
        self._arrivals = Arrivals(
            self._planner,
            self._transfers,
            self._runner,
            self._counters,
            self.info.block_bytes,
            config.kv_load_failure_policy == "recompute",
            self._finish,
        )
        self._emits: dict[str, Emit] = {}
        """Live requests, from `submit` to their last output. Guarded by the lock when written."""
        self._waits = Waits()
        self._lock = threading.Lock()
        self._stopping = False
        self._asleep = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Started, and neither stopped nor broken."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        self._transfers.start()
        if self._events is not None:
            self._events.start()
        self._thread.start()

    def stop(self) -> None:
        """End every live request as aborted, drop all leases, end the threads. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(self._begin_stop)
            self._thread.join(_STOP_TIMEOUT_S)
        self._transfers.stop()
        if self._experts is not None:
            self._experts.stop()
        if self._events is not None and not self._thread.is_alive():
            self._events.stop()

    def submit(self, request: EngineRequest, emit: Emit) -> None:
        """Queue a request. Raises InvalidRequest if it can never be served, RuntimeError once stopped."""
        check_request(request, self.info)
        request_id = request.request_id
        seed = request.sampling.seed
        seq = Sequence(request, self.info.block_size, secrets.randbits(64) if seed is None else seed)
        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine has stopped")
            if self._asleep:
                raise RuntimeError("the engine sleeps: POST /wake_up first")
            if request_id in self._emits or self._transfers.holds(request_id):
                raise InvalidRequest("request_id", f"{request_id} is in use")
            self._open_room(seq)
            self._emits[request_id] = emit
            submitted = time.monotonic()
            self._inbox.put(lambda: self._arrive(seq, submitted))

    def _open_room(self, seq: Sequence) -> None:
        room = seq.request.room
        digest = "" if room is None else seq.prompt_digest(seq.prompt_len)
        if room is not None and not self._transfers.pusher.open(room, seq.request_id, seq.prompt_len, digest):
            raise InvalidRequest("bootstrap_room", f"{room} is in use")

    def abort(self, request_id: str) -> None:
        """End a request early, with a last output ABORT; nothing if it has ended."""
        self._inbox.put(lambda: self._abort(request_id))

    def release(self, request_id: str) -> None:
        """Free the blocks kept for a pull that will not come; nothing if there are none."""
        self._inbox.put(lambda: self._release(request_id))

    def stats(self) -> EngineStats:
        experts = None if self._experts is None else self._experts.stats()
        return read_stats(
            self.info,
            self._counters,
            self._planner,
            self._pool,
            self._transfers,
            self._runner.expert_tokens(),
            () if experts is None else experts.imbalance,
            0 if experts is None else experts.copied,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when any block is in use or the engine does not run."""
        return self._ask(self._pool.reset_cache)

    @property
    def asleep(self) -> bool:
        return self._asleep

    def sleep(self) -> bool:
        """Give the KV cache's memory back and take no requests; False, and nothing happens, while one is here."""
        return self._ask(self._fall_asleep)

    def wake_up(self) -> bool:
        """Take requests again, with an empty cache; False when the engine does not run."""
        return self._ask(self._awake)

    def _ask(self, command: Callable[[], bool]) -> bool:
        """What a command says in the engine's thread; False when that does not run."""
        if not self.alive:
            return False
        done: Future[bool] = Future()
        self._inbox.put(lambda: done.set_result(command()))
        try:
            return done.result(_RESET_TIMEOUT_S)
        except TimeoutError:
            return False

    def _fall_asleep(self) -> bool:
        with self._lock:
            if self._emits or not self._pool.reset_cache():
                return False
            self._asleep = True
        self._runner.free_cache()
        return True

    def _awake(self) -> bool:
        if self._asleep:
            self._runner.renew_cache()
            self._asleep = False
        return True

    def kv_event_sources(self) -> list[dict[str, Any]]:
        """Where the prefix cache's events are published."""
        return [] if self._events is None else [self._events.source()]

    # -- the thread

    def _main(self) -> None:
        """Serve until stopped; then, or if that breaks, everybody who waits is told."""
        reason, error = FinishReason.ABORT, None
        try:
            self._loop()
        except RankLost as exc:
            log.error("the engine has stopped: %s", exc)
            reason, error = FinishReason.ABANDONED, str(exc)
        except Exception as exc:
            log.exception("the engine has stopped")
            reason, error = FinishReason.ERROR, say(exc)
        self._begin_stop()
        self._drain(0.0)
        for seq in self._planner:
            self._finish(seq, reason, error=error)

    def _loop(self) -> None:
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        busy = False
        while not self._stopping:
            self._drain(None if not busy else 0.0)
            if self._experts is not None:
                self._experts.check()
            if not self._stopping:
                self._expire_leases()
                busy = self._step()
            self._publish_events()

    def _publish_events(self) -> None:
        """Tell what this round has changed in the prefix cache."""
        if self._log is not None and self._events is not None:
            batch = self._log.take(time.time())
            if batch is not None:
                self._events.send(batch)

    def _begin_stop(self) -> None:
        with self._lock:
            self._stopping = True

    def _drain(self, wait_s: float | None) -> None:
        """Carry out the inbox's commands; wait for the first if there is nothing else to do."""
        expiry = self._transfers.next_expiry()
        if wait_s is None and expiry is not None:
            wait_s = max(0.0, expiry - time.monotonic())
        try:
            command = self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
            while True:
                self._carry_out(command)
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _arrive(self, seq: Sequence, submitted: float) -> None:
        self._waits.came(seq.request_id, submitted)
        self._planner.add(seq)

    def _carry_out(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            log.exception("an engine command failed")

    def _step(self) -> bool:
        """Plan and compute once; whether another step may follow at once."""
        try:
            plan = self._planner.plan()
        except Exception as exc:
            log.exception("planning failed")
            for seq in self._planner:
                self._finish(seq, FinishReason.ERROR, error=say(exc))
            return False
        self._counters.planned(plan)
        self._waits.admitted(plan.admitted, time.monotonic())
        for seq in plan.preempted:
            self._transfers.pusher.paused(seq.request_id)
            self._runner.forget(seq.request_id)
        for seq in plan.pulls:
            self._arrivals.begin(seq)
        if plan.chunks:
            self._stepper.compute(plan)
        return bool(plan.chunks or plan.admitted or plan.preempted)

    def _end_of(self, seq: Sequence) -> FinishReason | None:
        return finish_reason(seq, self.info.eos_token_ids, self.info.max_model_len)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        drawn: tuple[Drawn, ...] = (),
        error: str | None = None,
    ) -> None:
        """The one end of a request: blocks go home or into a lease, and the last output goes out."""
        keep = reason is FinishReason.LENGTH and seq.request.keep_kv
        if seq.request.room is not None:
            keep = self._end_room(seq, keep, reason)
        self._planner.remove(seq.request_id, pin_prompt=keep)
        self._runner.forget(seq.request_id)
        if self._drafter is not None:
            self._drafter.forget(seq.request_id)
        handoff = self._transfers.offer(seq) if keep else None
        self._counters.ended(reason)
        self._emit(output_of(seq, drawn, reason, handoff, error))

    def _end_room(self, seq: Sequence, keep: bool, reason: FinishReason) -> bool:
        """Whether a prefill leg's KV is still wanted: not when its receiver has it all, or has left."""
        if keep and self._transfers.pusher.is_open(seq.request_id):
            return True
        self._transfers.pusher.close(seq.request_id, f"the prefill has ended: {reason.value}")
        return False

    def _emit(self, output: Output) -> None:
        request_id = output.request_id
        waited = self._waits.told(request_id)
        if waited is not None:
            output = output._replace(queued_s=waited)
        emit = self._emits.get(request_id)
        if output.finish_reason is not None:
            with self._lock:
                self._emits.pop(request_id, None)
        if emit is None:
            return
        try:
            emit(output)
        except Exception:
            log.exception("nobody took the output of %s: it is aborted", request_id)
            self.abort(request_id)

    # -- commands

    def _abort(self, request_id: str) -> None:
        seq = self._planner.get(request_id)
        if seq is None:
            return
        if seq.wants_pull:
            self._transfers.abandon(seq)
        self._finish(seq, FinishReason.ABORT)

    def _release(self, request_id: str) -> None:
        if self._transfers.end_lease(request_id):
            self._unpin(request_id)

    def _release_or_unpin(self, request_id: str) -> None:
        """The other side is done with a request's KV, whether its lease has ended with that or still lives."""
        self._transfers.end_lease(request_id)
        self._unpin(request_id)

    def _unpin(self, request_id: str) -> None:
        self._transfers.pusher.close(request_id, "its KV is not kept any longer")
        self._pool.unpin(request_id)

    def _expire_leases(self) -> None:
        for request_id in self._transfers.expire_leases():
            log.warning("nobody pulled the KV of %s: its lease has expired", request_id)
            self._unpin(request_id)
