"""The gateway's metrics as Prometheus text: what was tallied, and what the core holds at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_proxy.messages import Stage
from omni_proxy.observe.tallies import Histogram, Tallies
from omni_proxy.scheduler.load import WorkerLoad


class Live:
    """What is asked of the core at the moment of a scrape."""

    def __init__(
        self,
        workers: Callable[[], Iterable[WorkerLoad]],
        waiting: Callable[[], tuple[int, int]],
        running: Callable[[], int],
    ) -> None:
        self.workers = workers
        self.waiting = waiting
        self.running = running


class Metrics(Collector):
    """Collects all metrics of one scheduler for a scrape."""

    def __init__(self, live: Live, tallies: Tallies) -> None:
        self._live = live
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        yield from self._request_families()
        yield from self._latency_families()
        yield from self._leg_families()
        yield from self._worker_families()
        yield from self._config_families()

    def _request_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("omni_requests", "Ended requests.", labels=("endpoint", "outcome", "error"))
        for key, count in sorted(self._tallies.requests().items()):
            requests.add_metric(key, count)
        yield requests
        waiting, waiting_tokens = self._live.waiting()
        yield GaugeMetricFamily("omni_requests_live", "Requests that have not ended.", value=self._live.running())
        yield GaugeMetricFamily("omni_queue_requests", "Requests that wait for a worker.", value=waiting)
        yield GaugeMetricFamily("omni_queue_tokens", "Prompt tokens that wait for a worker.", value=waiting_tokens)
        tokens = CounterMetricFamily("omni_tokens", "Tokens of completed requests.", labels=("kind",))
        tokens.add_metric(("prompt",), self._tallies.prompt_tokens)
        tokens.add_metric(("cached",), self._tallies.cached_tokens)
        tokens.add_metric(("generated",), self._tallies.generated_tokens)
        yield tokens

    def _latency_families(self) -> Iterator[Metric]:
        stages = HistogramMetricFamily(
            "omni_stage_seconds",
            "Time spent in each stage; a stage that was skipped is not counted.",
            labels=("stage",),
        )
        for stage, histogram in zip(Stage, self._tallies.stages, strict=True):
            if any(histogram.counts):
                _add(stages, histogram, (stage.name.lower(),))
        yield stages
        for name, text, histogram in (
            ("omni_ttft_seconds", "Arrival to first content token (streams).", self._tallies.ttft),
            ("omni_tpot_seconds", "Mean time per output token after the first (streams).", self._tallies.tpot),
            ("omni_itl_seconds", "Gap between two pieces of a stream as they came from the worker.", self._tallies.itl),
            ("omni_tokenizer_seconds", "Time that the tokenizer worked on a prompt.", self._tallies.tokenizer),
            ("omni_e2e_seconds", "Arrival to end of completed requests.", self._tallies.e2e),
            ("omni_encode_seconds", "Images and sound with encode workers, before arrival.", self._tallies.encode),
            (
                "omni_ttft_predicted_ratio",
                "TTFT as predicted when the prompt was sent, by the actual one.",
                self._tallies.ttft_predicted,
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=())
            _add(family, histogram, ())
            yield family

    def _leg_families(self) -> Iterator[Metric]:
        failures = CounterMetricFamily("omni_leg_failures", "Failed legs.", labels=("worker", "leg", "kind"))
        members = {w.spec.name for w in self._live.workers()}
        for key, count in sorted(self._tallies.leg_failures.items()):
            if key[0] in members:
                failures.add_metric(key, count)
        yield failures
        handoffs = CounterMetricFamily(
            "omni_handoffs", "Prefills that gave KV parameters (done) or none (missed).", labels=("result",)
        )
        handoffs.add_metric(("done",), self._tallies.handoffs_done)
        handoffs.add_metric(("missed",), self._tallies.handoffs_missed)
        yield handoffs
        text = "Prompt tokens whose KV went from P to D."
        yield CounterMetricFamily("omni_handoff_tokens", text, value=self._tallies.handoff_tokens)
        resumes = CounterMetricFamily(
            "omni_resumes", "Streams whose decode worker was lost, continued elsewhere or given up.", labels=("result",)
        )
        for result, count in self._tallies.resumes.items():
            resumes.add_metric((result,), count)
        yield resumes
        yield CounterMetricFamily("omni_retries", "Legs that were sent again.", value=self._tallies.retries)

    def _worker_families(self) -> Iterator[Metric]:
        labels = ("worker", "role")
        up = GaugeMetricFamily("omni_worker_up", "1: the worker can be used.", labels=labels)
        seqs = GaugeMetricFamily("omni_worker_sequences", "Requests that the worker holds for us.", labels=labels)
        prefill = GaugeMetricFamily(
            "omni_worker_prefill_tokens", "Prompt tokens that the worker has to compute for us.", labels=labels
        )
        kv = GaugeMetricFamily("omni_worker_kv_tokens", "KV tokens that the worker holds for us.", labels=labels)
        role = GaugeMetricFamily("omni_worker_role", "1: what the worker does now.", labels=labels)
        ejections = CounterMetricFamily("omni_worker_ejections", "Times that failures took it out.", labels=labels)
        capacity = GaugeMetricFamily(
            "omni_worker_kv_capacity_tokens", "KV tokens that the worker can hold, where it says so.", labels=labels
        )
        stranded = GaugeMetricFamily(
            "omni_worker_stranded_kv_tokens", "KV tokens that it keeps though nobody will pull them.", labels=labels
        )
        for worker in self._live.workers():
            key = (worker.spec.name, worker.spec.role.value)
            role.add_metric((worker.spec.name, worker.role.value), 1)
            up.add_metric(key, int(worker.up and not worker.draining))
            seqs.add_metric(key, worker.seqs)
            prefill.add_metric(key, worker.prefill_tokens)
            kv.add_metric(key, worker.kv_tokens)
            stranded.add_metric(key, worker.stranded_tokens)
            ejections.add_metric(key, worker.ejections)
            if worker.spec.kv_capacity_tokens is not None:
                capacity.add_metric(key, worker.spec.kv_capacity_tokens)
        yield from (up, seqs, prefill, kv, capacity, role, stranded, ejections)
        yield from self._worker_history()

    def _worker_history(self) -> Iterator[Metric]:
        """What was tallied of those that are members."""
        members = [w.spec.name for w in self._live.workers()]
        retries = CounterMetricFamily(
            "omni_worker_retries", "Requests that went on elsewhere after it had failed them.", labels=("worker",)
        )
        prompts = CounterMetricFamily(
            "omni_worker_prefills", "Prompts computed and handed over at the first try.", labels=("worker",)
        )
        seconds = CounterMetricFamily(
            "omni_worker_prefill_seconds",
            "Time of those from the grant to the answer, as predicted at the grant and as it was.",
            labels=("worker", "source"),
        )
        for name in members:
            retries.add_metric((name,), self._tallies.worker_retries.get(name, 0))
            times = self._tallies.prefills.get(name)
            if times is not None:
                prompts.add_metric((name,), times.count)
                seconds.add_metric((name, "predicted"), times.predicted_s)
                seconds.add_metric((name, "actual"), times.actual_s)
        yield from (retries, prompts, seconds)

    def _config_families(self) -> Iterator[Metric]:
        generation, failed = self._tallies.config
        yield GaugeMetricFamily("omni_config_generation", "Counts the configs that were in force.", value=generation)
        reloads = CounterMetricFamily("omni_config_reloads", "Config files that were read again.", labels=("result",))
        reloads.add_metric(("ok",), generation - 1)
        reloads.add_metric(("failed",), failed)
        yield reloads


def _add(family: HistogramMetricFamily, histogram: Histogram, labels: Sequence[str]) -> None:
    """Write cumulative buckets as Prometheus wants them."""
    cumulative, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    family.add_metric(labels, buckets, histogram.total)
