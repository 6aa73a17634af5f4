"""Real worker processes with a real engine on a tiny random checkpoint: start, serve, hand off, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from omni_proxy.workers.engine.worker_options import WorkerOptions
from tests.workers.server.conftest import write_tokenizer
from tests.workers.server.process import WorkerProcess, start_worker

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
TEXT = "the cat sat on the mat and the dog ate the bread, hello world"
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def layer_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    attention = {
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "mlp.gate": (4, 32),
    }
    experts = {f"mlp.experts.{at}.{name}_proj": (32, 32) for at in range(4) for name in ("gate", "up", "down")}
    return {f"{prefix}.{name}.weight": shape for name, shape in {**attention, **experts}.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint; written by hand, because importing a model class of transformers takes six seconds."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    folder.mkdir()
    vocab = write_tokenizer(folder)
    shapes = {"model.embed_tokens.weight": (vocab, 32), "model.norm.weight": (32,)}
    shapes |= layer_shapes("model.layers.0") | layer_shapes("model.layers.1")
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab}))
    return folder


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    workers = [start_worker(model, role=role, block_size=4, kv_cache_bytes=4 << 20) for role in ("prefill", "decode")]
    for worker in workers:
        worker.wait_ready()
    yield workers[0], workers[1]
    for worker in workers:
        worker.end()


def complete(worker: WorkerProcess, **body: Any) -> dict[str, Any]:
    body = {"prompt": TEXT, "temperature": 0, "return_token_ids": True, **body}
    response = httpx.post(worker.url + "/v1/completions", json=body, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_handoff_moves_the_kv_and_keeps_the_tokens(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p0, d0 = prefill.metrics(), decode.metrics()
    first = complete(prefill, max_tokens=1, kv_transfer_params=ASK)
    params = first["kv_transfer_params"]
    assert params["remote_port"] == prefill.ready["side_channel_port"]
    handed = complete(decode, max_tokens=12, ignore_eos=True, kv_transfer_params=params)
    p1, d1 = prefill.metrics(), decode.metrics()
    prompt = first["usage"]["prompt_tokens"]
    assert p1["local_compute"] - p0["local_compute"] == prompt
    assert d1["local_compute"] - d0["local_compute"] <= 1
    assert d1["external_kv_transfer"] - d0["external_kv_transfer"] >= prompt - 1
    moved = p1["omni_kv_bytes_sent_total"] - p0["omni_kv_bytes_sent_total"]
    assert moved == d1["omni_kv_bytes_received_total"] - d0["omni_kv_bytes_received_total"] > 0
    alone = complete(prefill, max_tokens=12, ignore_eos=True)
    assert handed["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert handed["choices"][0]["text"] == alone["choices"][0]["text"]
    assert handed["usage"]["prompt_tokens_details"]["cached_tokens"] >= prompt - 1
    assert prefill.metrics()["omni_kv_blocks_leased"] == 0


def test_a_lease_can_be_given_back(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    params = complete(prefill, max_tokens=1, kv_transfer_params=ASK)["kv_transfer_params"]
    assert prefill.metrics()["omni_kv_blocks_leased"] > 0
    body = {"request_id": params["remote_request_id"]}
    httpx.post(prefill.url + "/omni/release", json=body, trust_env=False)
    wait_for(prefill, "omni_kv_blocks_leased", 0)
    body = {"prompt": TEXT, "kv_transfer_params": params}
    response = httpx.post(decode.url + "/v1/completions", json=body, timeout=30, trust_env=False)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["type"] == "abandoned"
    assert "KV pull failed" in error["message"]


def test_a_client_that_leaves_ends_its_request(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    worker = pair[1]
    body = {"prompt": TEXT, "stream": True, "ignore_eos": True, "n": 3}
    with httpx.stream("POST", worker.url + "/v1/completions", json=body, trust_env=False) as response:
        next(response.iter_lines())
    wait_for(worker, "vllm:num_requests_running", 0)
    assert worker.metrics()["vllm:kv_cache_usage_perc"] == 0


def wait_for(worker: WorkerProcess, name: str, value: float, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while worker.metrics()[name] != value:
        assert time.monotonic() < end, f"{name} did not become {value}"


def fails(worker: WorkerProcess) -> str:
    """What a worker that cannot start says: one line."""
    assert worker.process.stderr is not None
    said = worker.process.stderr.read()
    assert worker.process.wait(20) == 2, said
    os.close(worker.ready_pipe)
    worker.end()
    assert said.startswith("omni-proxy worker: ")
    assert said.count("\n") == 1
    return said


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    assert "nowhere: no such model folder" in fails(start_worker(tmp_path / "nowhere"))
    assert "tokenizer.json: no such file" in fails(start_worker(tmp_path))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def add_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def rename(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cut, "model.safetensors: not a whole safetensors file"),
        (add_layer, "model.safetensors: tensor model.layers.2."),
        (rename, "config.json: model_type 'gpt2' is not supported"),
    ],
)
def test_a_bad_checkpoint_is_one_line(model: Path, tmp_path: Path, spoil: Callable[[Path], None], text: str) -> None:
    folder = Path(copytree(model, tmp_path / "spoilt"))
    spoil(folder)
    assert text in fails(start_worker(folder))


def test_a_port_in_use_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in fails(start_worker(model, port=port))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"role": "p"}, "role must be one of prefill, decode, mixed; got 'p'"),
        ({"port": 70000}, "port must be in 0..65535"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"log_level": "loud"}, "log_level must be one of"),
    ],
)
def test_bad_options_are_known_at_once(options: dict[str, Any], text: str) -> None:
    assert text in (WorkerOptions("x", **options).problem() or "")


def test_a_signal_during_the_start_ends_it_quietly(model: Path) -> None:
    worker = start_worker(model)
    maps = Path(f"/proc/{worker.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc to see how far the worker is")
    while "libtorch" not in maps.read_text():
        assert worker.process.poll() is None
    worker.process.send_signal(signal.SIGINT)
    said = worker.process.communicate(timeout=20)[1]
    os.close(worker.ready_pipe)
    worker.end()
    assert (worker.process.returncode, said) == (0, "")


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "config.json" in fails(start_worker(tmp_path))


# The last two tests end the pair.


def test_sigterm_lets_running_requests_end(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    worker = pair[0]
    body = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", worker.url + "/v1/completions", json=body, timeout=30, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert worker.process.wait(20) == 0


def test_a_worker_ends_with_its_launcher(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    begun = time.monotonic()
    assert pair[1].end() == 1
    assert time.monotonic() - begun < 5
