"""`omni-proxy bench`: from options to a printed and saved result."""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import uvloop

from omni_proxy.config import ConfigError
from omni_proxy.sim.bench.client import BenchClient, BenchPlan
from omni_proxy.sim.bench.measure import BenchResult, bench_figures, faults, lag, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.commands import parse_slo, write_file
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.http.client import ClientFault, HttpPool
from omni_proxy.sim.report import latency_table, seconds_text, summary
from omni_proxy.sim.setup import WorkloadChoice, at_rate, load_workload
from omni_proxy.sim.workload import Workload

EXIT_NOTHING: Final = 1


@dataclass(frozen=True, slots=True)
class _Asked:
    options: argparse.Namespace
    workload: Workload
    slo: Slo


def bench(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run, print, save. 1 where nothing was answered. Raises ConfigError."""
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    if options.rate is not None:
        workload = at_rate(workload, options.rate)
    raise_open_files()
    asked = _Asked(options, workload, parse_slo(options.slo))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_run(asked))
    say(_text(result))
    if options.json is not None:
        write_file(options.json, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return 0 if result.figures.ttft is not None else EXIT_NOTHING


async def _run(asked: _Asked) -> BenchResult:
    options = asked.options
    try:
        pool = HttpPool(options.url)
    except ValueError as exc:
        raise ConfigError(f"--url: {exc}") from exc
    try:
        model = options.model or await _first_model(pool, options.url)
        plan = BenchPlan(
            model=model,
            chat=options.endpoint == "chat",
            stream=not options.no_stream,
            concurrency=options.concurrency,
            timeout_s=options.timeout,
            speed=options.speed,
            headers="".join(map(_header_line, options.header)),
            ignore_eos=not options.respect_eos,
        )
        prompts = Prompts(PromptForm(options.prompt), asked.workload.block_tokens, options.vocabulary)
        begun = time.process_time()
        seen = await BenchClient(pool, asked.workload, prompts, plan).run()
        cpu_s = time.process_time() - begun
    finally:
        await pool.close()
    speed = options.speed
    requests = tuple(uncompressed(one, speed) for one in seen)
    return BenchResult(
        url=options.url,
        workload=f"{asked.workload.name}, {len(seen)} requests",
        settings=_settings(options, model),
        speed=speed,
        figures=bench_figures(requests, asked.slo),
        lag=lag(seen),
        cpu_s=cpu_s,
        requests=requests,
    )


def _header_line(text: str) -> str:
    """`NAME: VALUE` as it is sent. Raises ConfigError."""
    name, colon, _ = text.partition(":")
    if not colon or not name.strip() or not text.isprintable() or not text.isascii() or " " in name:
        raise ConfigError(f"--header: must be NAME: VALUE, got {text!r}")
    return f"{text}\r\n"


async def _first_model(pool: HttpPool, url: str) -> str:
    try:
        status, body = await pool.fetch("GET", "/v1/models")
        if status != 200:
            raise ConfigError(f"{url}: /v1/models says {status}; name the model with --model")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except ClientFault as exc:
        raise ConfigError(f"{url}: {exc}") from exc
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError) as exc:
        raise ConfigError(f"{url}: /v1/models names no model; name it with --model") from exc


def _settings(options: argparse.Namespace, model: str) -> dict[str, str]:
    named = ("limit", "seed", "rate", "concurrency", "speed", "endpoint", "prompt", "timeout")
    chosen = {name: getattr(options, name) for name in named}
    return {"model": model, **{name: str(value) for name, value in chosen.items() if value is not None}}


def _text(result: BenchResult) -> str:
    found = result.figures
    compressed = f", time compressed {result.speed:g} times" if result.speed != 1 else ""
    parts = [
        f"{result.workload} against {result.url} in {seconds_text(found.seconds)}{compressed}",
        latency_table(found),
        summary(found),
    ]
    late = result.lag
    if late is not None:
        parts.append(f"client   late by {seconds_text(late.p99)} at p99, {result.cpu_s:.1f} s of CPU")
    parts += faults(result.requests)
    return "\n\n".join(parts)


def raise_open_files() -> None:
    """Hundreds of streams need as many sockets: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
