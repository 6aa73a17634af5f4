"""The command `worker`."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_proxy.cli.arguments import Commands, add_drafts, add_expert_parallel, port, positive, seconds
from omni_proxy.config import ConfigError
from omni_proxy.demo import DEMO_NAME, demo_model
from omni_proxy.sim import options as sim_options


def add_worker(commands: Commands) -> None:
    """Add the command."""
    worker = commands.add_parser("worker", help="run one embedded worker")
    worker.add_argument("--role", choices=("prefill", "decode", "mixed"), default="mixed")
    worker.add_argument(
        "--model", type=Path, default=None, metavar="PATH", help="model folder or GGUF file (default: the demo)"
    )
    worker.add_argument("--served-model-name", action="append", default=[], metavar="NAME")
    worker.add_argument("--host", default="127.0.0.1")
    worker.add_argument("--port", type=port, default=0, metavar="P", help="0 lets the system choose (default)")
    worker.add_argument("--side-channel-port", type=port, default=0, metavar="P", help="port of the KV handoff")
    worker.add_argument("--kv-events-port", type=port, default=None, metavar="P", help="publish cache events there")
    worker.add_argument("--block-size", type=positive, default=16, metavar="TOKENS")
    worker.add_argument("--kv-cache-mib", type=positive, default=256, metavar="MIB")
    worker.add_argument("--max-num-seqs", type=positive, default=32, metavar="N")
    worker.add_argument("--max-num-batched-tokens", type=positive, default=2048, metavar="TOKENS")
    worker.add_argument("--max-model-len", type=positive, default=None, metavar="TOKENS")
    worker.add_argument("--kv-lease", type=seconds, default=30.0, metavar="SECONDS")
    worker.add_argument("--kv-load-failure-policy", choices=("fail", "recompute"), default="fail")
    worker.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    worker.add_argument(
        "--quantization", choices=("int8", "w8a8"), default=None, help="of the weights (w8a8: and of rows)"
    )
    add_drafts(worker)
    worker.add_argument("--speculative-tokens", type=positive, default=8, metavar="N", help="the longest draft")
    worker.add_argument("--threads", type=positive, default=1, metavar="N")
    add_expert_parallel(worker)
    where = "register at this gateway's port for that (several)"
    worker.add_argument("--register", action="append", default=[], metavar="URL", help=where)
    worker.add_argument("--token-file", type=Path, default=None, metavar="FILE", help="holds the token for that")
    worker.add_argument("--advertise", default=None, metavar="HOST", help="by which gateways reach it; default: --host")
    worker.add_argument("--name", default=None, metavar="NAME", help="by which gateways know it")
    worker.add_argument("--drain", type=seconds, default=5.0, metavar="SECONDS")
    worker.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    worker.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    worker.add_argument("--parent-fd", type=int, default=None, help=argparse.SUPPRESS)
    sim_options.add_pretending(worker)
    worker.set_defaults(run=_worker)


def _worker(options: argparse.Namespace) -> int:
    if options.simulate is not None and options.register:
        raise ConfigError("--register: a simulated worker does not register itself")
    if options.simulate is not None:
        from omni_proxy.sim.pretend.command import pretend

        return pretend(options)
    try:
        from omni_proxy.workers.engine.worker import run_worker
        from omni_proxy.workers.engine.worker_options import WorkerOptions
    except ImportError as exc:
        raise ConfigError(f"the worker needs the extra [worker]: pip install 'omni-proxy[worker]' ({exc})") from exc
    model = options.model or demo_model()
    names = tuple(options.served_model_name) or ((DEMO_NAME,) if options.model is None else ())
    return run_worker(
        WorkerOptions(
            model=str(model),
            role=options.role,
            host=options.host,
            port=options.port,
            served_model_name=names,
            block_size=options.block_size,
            kv_cache_bytes=options.kv_cache_mib << 20,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            kv_lease_s=options.kv_lease,
            kv_load_failure_policy=options.kv_load_failure_policy,
            dtype=options.dtype,
            quantization=options.quantization,
            threads=options.threads,
            speculation=options.speculation,
            speculative_tokens=options.speculative_tokens,
            draft_model=options.draft_model,
            expert_parallel=options.expert_parallel,
            expert_redundancy=options.expert_redundancy,
            expert_window_steps=options.expert_window,
            side_channel_port=options.side_channel_port,
            kv_events_port=options.kv_events_port,
            ready_fd=options.ready_fd,
            parent_fd=options.parent_fd,
            log_level=options.log_level,
            drain_s=options.drain,
            register=tuple(options.register),
            token_file=None if options.token_file is None else str(options.token_file),
            advertise=options.advertise,
            name=options.name,
        )
    )
