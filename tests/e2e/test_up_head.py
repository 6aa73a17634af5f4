"""`omni-proxy up --speculation head`: in both modes a draft head changes nothing of what is streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from omni_proxy.demo import DEMO_NAME, demo_model
from tests.e2e.test_up_parallel import samples
from tests.e2e.up import Up, up

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(240)]

QUESTIONS = ("Tell me a story about a fox.", "What is a spoon for?")


def write_head(folder: Path) -> Path:
    """An EAGLE head of the demo model that guesses from the last token alone: seldom right, and often wrong."""
    model = json.loads((demo_model() / "config.json").read_text())
    hidden, heads, keys, dim = (
        model[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * dim}
    tensors = {f"layers.0.self_attn.{name}.weight": (rows, hidden) for name, rows in shapes.items()}
    tensors |= {"layers.0.self_attn.o_proj.weight": (hidden, heads * dim)}
    tensors |= {f"layers.0.mlp.{name}_proj.weight": (64, hidden) for name in ("gate", "up")}
    tensors |= {"layers.0.mlp.down_proj.weight": (hidden, 64), "layers.0.post_attention_layernorm.weight": (hidden,)}
    made = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in tensors.items()}
    eye = torch.eye(hidden)
    save_file({**made, "fc.weight": torch.cat((eye, eye), 1).contiguous()}, folder / "model.safetensors")
    said = {**model, "model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


async def streamed(running: Up, question: str) -> str:
    body: dict[str, Any] = {
        "model": DEMO_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
    }
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(f"{running.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.rstrip().endswith("data: [DONE]")
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


async def test_both_modes_stream_what_is_streamed_without_drafts(tmp_path: Path) -> None:
    told = []
    head = ("--speculation", "head", "--draft-model", str(write_head(tmp_path)))
    for arguments in (("--speculation", "off"), (*head, "--schedule-mode", "parallel"), head):
        async with up("--prefill", "1", "--decode", "1", *arguments) as running:
            told.append([await streamed(running, question) for question in QUESTIONS])
            metrics = await samples(running.worker_urls["decode-0"])
            guessed = sum(n for name, n in metrics.items() if name.startswith('omni_draft_tokens_total{kind="head"'))
            assert (guessed > 0) == ("head" in arguments)
    assert len(told[0][0].split()) > 10
    assert told[0] == told[1] == told[2]
