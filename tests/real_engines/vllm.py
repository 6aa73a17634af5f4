"""Real vLLM for CPUs, with KV handed over by NIXL, in the environment that scripts/real-vllm-env makes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

from omni_proxy.demo import demo_model
from tests.real_engines.processes import Server, free_port

MODEL = "omni-demo"
LEASE_S = 8
"""How long P keeps KV that nobody pulls; the engine's default is 30."""
BLOCK = 128
"""Tokens in a block of vLLM's cache on a CPU."""


@functools.cache
def environment() -> Path | str:
    """The virtual environment; where it cannot be had, why. Made when it is not there: minutes, once."""
    script = Path(__file__).parents[2] / "scripts" / "real-vllm-env"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no environment with vLLM: {done.stderr[-500:].strip()}"
    return Path(done.stdout.strip())


def vllm(venv: Path, name: str, role: str, folder: Path, core: int) -> Server:
    """One vLLM with the demo model. `role`: kv_producer or kv_consumer; `core`: on which its threads run."""
    port, events, replay = free_port(), free_port(), free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "engine_id": name,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": f"kv@127.0.0.1:{port}@{MODEL}",
    }
    command = [
        *(str(venv / "bin" / "vllm"), "serve", str(demo_model()), "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--enable-prompt-tokens-details"),
        *(
            "--structured-outputs-config",
            '{"backend": "xgrammar", "disable_any_whitespace": true}',
        ),  # a small model would write nothing else
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(published)),
    ]
    settings = {
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "",
        "VIRTUAL_ENV": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": "tcp,shm,self,cma",
        "UCX_NET_DEVICES": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    return Server(name, command, port, folder, settings)


def cores(count: int) -> list[int]:
    """A core for each of so many engines; several share one where there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    return [usable[i % len(usable)] for i in range(count)]
