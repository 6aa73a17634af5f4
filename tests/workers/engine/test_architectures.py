"""Every architecture against its definition: logits in chunks and op by op, greedy tokens through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from omni_kernels import registry
from omni_proxy.workers.engine.architectures.registry import ARCHITECTURES
from omni_proxy.workers.engine.checkpoint import load_checkpoint
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.model import DecoderModel
from omni_proxy.workers.engine.types import FinishReason
from tests.workers.engine.architectures import CONFIGS, PANGU, logits_of, write, write_pangu
from tests.workers.engine.heads import write_headed
from tests.workers.engine.helpers import Call, generate, prompt, pull_from, request, running
from tests.workers.engine.test_model import Paged, difference

VOCAB = 128
LIMIT = 1e-3


@dataclass(frozen=True)
class Case:
    """A folder and the logits of its definition."""

    folder: Path
    logits: Callable[[tuple[int, ...]], torch.Tensor]

    def greedy(self, tokens: tuple[int, ...], count: int) -> list[int]:
        for _ in range(count):
            tokens = (*tokens, int(self.logits(tokens)[-1].argmax()))
        return list(tokens[-count:])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name == "pangu":
                made[name] = Case(folder, write_pangu(folder))
            elif name == "mimo":  # Qwen2, and a head that nobody asks for
                headed = write_headed(folder, "mimo").model
                made[name] = Case(folder, lambda tokens: logits_of(headed, tokens))
            else:
                model = write(folder, CONFIGS[name])
                made[name] = Case(folder, lambda tokens: logits_of(model, tokens))
        return made[name]

    return case


NAMES = [*CONFIGS, "pangu", "mimo"]


def test_every_architecture_has_a_case() -> None:
    assert {c["model_type"] for c in [*CONFIGS.values(), PANGU]} | {"mimo"} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_whole_in_chunks_and_op_by_op(cases: Callable[[str], Case], name: str) -> None:
    case, tokens = cases(name), prompt(70, vocab=VOCAB)
    want = case.logits(tokens)
    for cuts, fused in (((0, 70), True), ((0, 70), False), ((0, 1, 9, 40, 41, 69, 70), True)):
        paged = Paged(case.folder, 1, 70)
        if not fused:
            paged.model = DecoderModel(load_checkpoint(case.folder), 256, fused=False)
        for start, stop in pairwise(cuts):
            (got,) = paged.run([(0, start, tokens[start:stop])])
            assert difference(got, want[start:stop]) < LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_through_prefix_hits_and_a_handoff(cases: Callable[[str], Case], name: str) -> None:
    case, tokens = cases(name), prompt(37, vocab=VOCAB)
    want = case.greedy(tokens, 6)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with running(case.folder, engine_id="p", **sizes) as p, running(case.folder, engine_id="d") as d:
        assert generate(p, "cold", tokens, 6) == want
        assert generate(p, "warm", tokens, 6) == want
        assert p.stats().prefix_hits > 0
        leg = Call(p, request("leg", tokens, 1, keep_kv=True))
        assert leg.end().finish_reason is FinishReason.LENGTH
        assert generate(d, "pulled", tokens, 6, pull=pull_from(leg.outputs[-1].handoff)) == want
        assert d.stats().prompt_tokens_pulled == 36
        assert d.stats().prompt_tokens_computed == 1


@pytest.mark.parametrize("row_bits", [0, 8])
@pytest.mark.parametrize("name", ["llama3", "mixtral", "deepseek_v3", "pangu"])
def test_int8_weights_stay_close(cases: Callable[[str], Case], name: str, row_bits: int) -> None:
    case, tokens = cases(name), prompt(20, vocab=VOCAB)
    paged = Paged(case.folder, 1, 20)
    model = partial(DecoderModel, load_checkpoint(case.folder), 256, weight_dtype=torch.int8, row_bits=row_bits)
    if row_bits and (name == "deepseek_v3" or registry.cpu_library() is None):
        with pytest.raises(ValueError, match=r"^quantization w8a8: this model runs op by op"):
            model()
        return
    paged.model = model()
    (got,) = paged.run([(0, 0, tokens)])
    want = case.logits(tokens)
    error = ((got - want).norm() / want.norm()).item()
    assert 0 < error < 0.1


def test_with_rows_of_8_bits_neighbours_change_nothing(cases: Callable[[str], Case]) -> None:
    if registry.cpu_library() is None:
        pytest.skip("no compiled kernels here")
    asked = [request(str(n), prompt(9 + n, vocab=VOCAB), 20) for n in range(4)]
    with running(cases("mixtral").folder, quantization="w8a8", dtype="bfloat16") as engine:
        alone = [Call(engine, replace(one, request_id=f"alone-{one.request_id}")).tokens for one in asked]
        calls = [Call(engine, one) for one in asked]
        assert [call.tokens for call in calls] == alone


def test_an_engine_with_int8_weights_refuses_kv_of_exact_ones(cases: Callable[[str], Case]) -> None:
    case, tokens = cases("llama3"), prompt(9, vocab=VOCAB)
    with running(case.folder, engine_id="p") as p, running(case.folder, quantization="int8") as d:
        leg = Call(p, request("leg", tokens, 1, keep_kv=True))
        leg.end()
        pulled = Call(d, request("pulled", tokens, 2, pull=pull_from(leg.outputs[-1].handoff)))
        assert "quantization is none here and int8 there" in str(pulled.end().error)
        p.release("leg")


def test_bfloat16_of_latent_attention_is_close(cases: Callable[[str], Case]) -> None:
    case, tokens = cases("deepseek_v3"), prompt(12, vocab=VOCAB)
    (got,) = Paged(case.folder, 1, 12, dtype=torch.bfloat16).run([(0, 0, tokens)])
    want = case.logits(tokens)
    assert (got.float() - want).norm() / want.norm() < 0.15


def test_dynamic_scaling_serves_beyond_the_trained_context(tmp_path: Path) -> None:
    """The engine's limit sets the base once, as transformers' does with a prompt of that length."""
    model = write(tmp_path, {**CONFIGS["llama_dynamic"], "max_position_embeddings": 32})
    tokens = prompt(100, vocab=VOCAB)
    with running(tmp_path, max_model_len=101) as engine:
        assert isinstance(engine, Engine)
        assert engine.info.max_model_len == 101
    paged = Paged(tmp_path, 1, 100)
    paged.model = DecoderModel(load_checkpoint(tmp_path), 100)
    (got,) = paged.run([(0, 0, tokens)])
    assert difference(got, logits_of(model, tokens)) < LIMIT
