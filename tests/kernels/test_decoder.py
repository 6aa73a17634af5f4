"""A decoder's one-call step against the same step op by op, and what it promises: rows, threads, arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_kernels import registry

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB, SIZE, LIMIT = 4, 2, 16, 48, 70, 4, 256


def layer(experts: int, wide: int, top_k: int, *, qk_norm: bool = True, **more: Any) -> ops.DecoderLayer:
    """Random weights; `experts` 0 is a dense MLP."""
    shape = (experts,) if experts else ()
    return ops.DecoderLayer(
        attention_norm=torch.rand(HIDDEN) + 0.5,
        qkv=torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) / HIDDEN**0.5,
        qk_norm=torch.rand(HEADS + KV_HEADS, DIM) + 0.5 if qk_norm else None,
        out=torch.randn(HIDDEN, HEADS * DIM) / HIDDEN**0.5,
        mlp_norm=torch.rand(HIDDEN) + 0.5,
        w13=torch.randn(*shape, 2 * wide, HIDDEN) / HIDDEN**0.5,
        w2=torch.randn(*shape, HIDDEN, wide) / wide**0.5,
        gate=torch.randn(experts, HIDDEN) if experts else None,
        top_k=top_k,
        **more,
    )


def varied_layers() -> list[ops.DecoderLayer]:
    """Biases; grouped sigmoid routing with a correction, a scale and a shared expert; as many experts of each group."""
    biases = {"qkv_bias": torch.randn((HEADS + 2 * KV_HEADS) * DIM), "out_bias": torch.randn(HIDDEN)}
    shared = {"shared13": torch.randn(26, HIDDEN) / HIDDEN**0.5, "shared2": torch.randn(HIDDEN, 13) / 13**0.5}
    grouped = ops.Routing("sigmoid", torch.randn(6), groups=3, top_groups=2, scale=2.5)
    return [
        layer(0, 33, 1, **biases),
        layer(6, 20, 2, routing=grouped, **shared),
        layer(6, 16, 3, routing=ops.Routing(groups=3, per_group=True), renormalise=False, **biases, **shared),
        layer(6, 16, 2, routing=ops.Routing(groups=3, top_groups=1, group_best=1)),
    ]


def decoder_weights(layers: list[ops.DecoderLayer] | None = None, **more: Any) -> ops.DecoderWeights:
    """Three layers unless given: experts, dense, experts without head norms."""
    layers = layers or [layer(6, 20, 2), layer(0, 33, 1), layer(6, 16, 3, qk_norm=False)]
    embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    cos, sin = ops.rope_table(DIM, LIMIT, 1e4)
    norm = torch.rand(HIDDEN) + 0.5
    return ops.DecoderWeights(embedding, layers, norm, head, cos, sin, HEADS, KV_HEADS, 1e-6, **more)


@dataclass(frozen=True)
class Rows:
    """One step's arguments."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    batch: ops.AttentionBatch
    logit_rows: Tensor


def rows_of(lens: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Rows:
    """Chunks (rows, keys after them); the tokens are the whole sequences'. Logits of every row."""
    places = [(s, p) for s, (n, m) in enumerate(lens) for p in range(m - n, m)]
    return Rows(
        torch.tensor([tokens[s][p] for s, p in places]),
        torch.tensor([p for _, p in places]),
        torch.tensor([tables[s][p // SIZE] * SIZE + p % SIZE for s, p in places]),
        ops.attention_batch([n for n, _ in lens], [m for _, m in lens], tables, SIZE),
        torch.arange(len(places)),
    )


def by_ops(w: ops.DecoderWeights, r: Rows, kv: Tensor, counts: Tensor) -> Tensor:
    """The step's definition."""
    run = registry.TORCH
    x = F.embedding(r.tokens, w.embedding)
    cos, sin = w.cos[r.positions], w.sin[r.positions]
    for i, one in enumerate(w.layers):
        normed, _ = run["rms_norm"](x, one.attention_norm, w.eps)
        qkv = (normed @ one.qkv.t() + (0.0 if one.qkv_bias is None else one.qkv_bias)).view(x.shape[0], -1, DIM)
        qk, values = qkv[:, : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
        if one.qk_norm is not None:
            qk = head_norms(w, one.qk_norm, qk)
        if w.clip is not None:
            qk, values = qk.clamp(-w.clip, w.clip), values.clamp(-w.clip, w.clip)
        qk = run["rope"](qk, cos, sin)
        run["kv_write"](kv[i], r.slots, qk[:, HEADS:], values)
        seen = run["paged_attention"](qk[:, :HEADS], kv[i], r.batch, DIM**-0.5)
        x = x + seen.flatten(1) @ one.out.t() + (0.0 if one.out_bias is None else one.out_bias)
        normed, _ = run["rms_norm"](x, one.mlp_norm, w.eps)
        if one.gate is None:
            x = x + run["silu_and_mul"](normed @ one.w13.t()) @ one.w2.t()
            continue
        how = {name: getattr(one.routing, name) for name in ops.Routing.__slots__}
        ids, weights, chosen = run["moe_route"](normed @ one.gate.t(), one.top_k, one.renormalise, **how)
        counts[i] += chosen
        x = x + run["fused_moe"](normed, one.w13, one.w2, ids, weights, chosen)
        if one.shared13 is not None and one.shared2 is not None:
            x = x + run["silu_and_mul"](normed @ one.shared13.t()) @ one.shared2.t()
    return run["rms_norm"](x[r.logit_rows], w.norm, w.eps)[0] @ w.head.t()


def head_norms(w: ops.DecoderWeights, norm: Tensor, qk: Tensor) -> Tensor:
    """Of each head, or of all heads of the queries and of the keys at once."""
    if not w.norm_rows:
        normed: Tensor = registry.TORCH["rms_norm"](qk, norm, w.eps)[0]
        return normed
    parts = zip(qk.split([HEADS, KV_HEADS], 1), norm.split([HEADS, KV_HEADS]), strict=True)
    whole = [registry.TORCH["rms_norm"](heads.flatten(1), one.flatten(), w.eps)[0] for heads, one in parts]
    return torch.cat(whole, 1).view_as(qk)


class Case:
    """A decoder with an empty cache and three sequences in scattered blocks."""

    def __init__(self, weights: ops.DecoderWeights | None = None) -> None:
        self.weights = weights or decoder_weights()
        decoder = ops.build_decoder(self.weights)
        assert decoder is not None
        self.decoder = decoder
        order = torch.randperm(60).tolist()
        self.tables = [order[i * 20 : (i + 1) * 20] for i in range(3)]
        self.tokens = torch.randint(0, VOCAB, (3, 80)).tolist()
        layers = len(self.weights.layers)
        self.kv = torch.zeros(layers, 2, 60, SIZE, KV_HEADS, DIM)
        self.counts = torch.zeros(layers, 6, dtype=torch.int64)

    def rows(self, lens: Sequence[tuple[int, int]]) -> Rows:
        return rows_of(lens, self.tables[: len(lens)], self.tokens[: len(lens)])

    def step(self, r: Rows, kv: Tensor | None = None) -> Tensor:
        cache = self.kv if kv is None else kv
        return self.decoder.step(r.tokens, r.positions, r.slots, r.batch, r.logit_rows, cache, self.counts)


@pytest.fixture
def case(compiled: str) -> Case:
    return Case()


OPTIONS: dict[str, dict[str, Any]] = {
    "heads": {},
    "rows": {"norm_rows": True},
    "clipped": {"clip": 0.5, "norm_rows": True},
}


def test_a_step_equals_the_same_step_op_by_op(case: Case) -> None:
    assert_equal_steps(case)


@pytest.mark.parametrize("option", OPTIONS)
def test_so_does_one_of_other_architectures(compiled: str, option: str) -> None:
    assert_equal_steps(Case(decoder_weights(varied_layers(), **OPTIONS[option])))


def assert_equal_steps(case: Case) -> None:
    kv, counts = case.kv.clone(), torch.zeros_like(case.counts)
    for lens in ([(30, 30), (7, 7), (12, 12)], [(1, 31), (1, 8), (40, 52)], [(1, 32), (1, 9), (1, 53)]):
        rows = case.rows(lens)
        got, want = case.step(rows), by_ops(case.weights, rows, kv, counts)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(case.kv, kv, atol=2e-4, rtol=1e-4)
        assert case.counts.equal(counts)


def test_neither_chunks_nor_neighbours_nor_threads_change_a_bit(case: Case) -> None:
    whole = case.step(case.rows([(50, 50)]))
    again = torch.zeros_like(case.kv)
    for first, last in ((0, 1), (1, 13), (13, 14), (14, 50)):
        torch.set_num_threads(1 + first % 3)
        part = case.step(case.rows([(last - first, last)]), again)
        assert part.equal(whole[first:last])
    crowded = torch.zeros_like(case.kv)
    torch.set_num_threads(2)
    together = case.step(case.rows([(50, 50), (9, 9), (80, 80)]), crowded)
    assert together[:50].equal(whole)
    assert crowded[:, :, case.tables[0]].equal(again[:, :, case.tables[0]])


def test_a_cache_in_bfloat16(case: Case) -> None:
    rows = case.rows([(30, 30), (7, 7)])
    want = case.step(rows)
    got = case.step(rows, case.kv.to(torch.bfloat16))
    torch.testing.assert_close(got, want, atol=0.2, rtol=0.05)


@pytest.fixture(params=["amx", "vectors"])
def unit(request: pytest.FixtureRequest, compiled: str) -> Iterator[str]:
    """Every instruction set, with AMX and without it."""
    library = registry.cpu_library()
    assert library is not None
    if not library.omni_use_amx(request.param == "amx") and request.param == "amx":
        pytest.skip("this machine has no AMX")
    yield compiled
    library.omni_use_amx(1)


def bfloat16_case() -> Case:
    """A model of bfloat16, whose rows are multiplied as such where the CPU does that."""
    weights = decoder_weights(varied_layers())
    exact = replace(weights, layers=[_halved(one) for one in weights.layers], head=weights.head.bfloat16())
    case = Case(replace(exact, embedding=weights.embedding.bfloat16()))
    case.kv = case.kv.bfloat16()
    return case


def _halved(one: ops.DecoderLayer) -> ops.DecoderLayer:
    names = ("qkv", "out", "w13", "w2", "gate", "shared13", "shared2")
    given = {name: getattr(one, name) for name in names}
    return replace(one, **{name: w.bfloat16() for name, w in given.items() if w is not None})


def test_a_model_of_bfloat16_stays_close(unit: str) -> None:
    case = bfloat16_case()
    wide = {name: getattr(case.weights, name).float() for name in ("embedding", "head")}
    layers = [replace(one, **_widened(one)) for one in case.weights.layers]
    plain = Case(replace(case.weights, layers=layers, **wide))
    rows = case.rows([(30, 30), (7, 7), (1, 1)])
    got, want = case.step(rows), by_ops(plain.weights, rows, plain.kv, plain.counts)
    assert ((got - want).norm() / want.norm()).item() < 0.05


def _widened(one: ops.DecoderLayer) -> dict[str, Tensor]:
    fields = {name: getattr(one, name) for name in ops.DecoderLayer.__slots__}
    return {name: w.float() for name, w in fields.items() if isinstance(w, Tensor)}


def check_that_rows_stand_alone(case: Case) -> None:
    """In chunks, with other numbers of threads, and beside other sequences they come out the same, bit for bit."""
    whole = case.step(case.rows([(50, 50)]))
    again = torch.zeros_like(case.kv)
    for first, last in ((0, 1), (1, 13), (13, 14), (14, 50)):
        torch.set_num_threads(1 + first % 3)
        part = case.step(case.rows([(last - first, last)]), again)
        assert part.equal(whole[first:last])
    together = case.step(case.rows([(50, 50), (9, 9), (80, 80)]), torch.zeros_like(case.kv))
    assert together[:50].equal(whole)


@pytest.mark.parametrize("shape", [(4, 2, 16, 4), (4, 2, 32, 4), (6, 6, 64, 16), (18, 6, 32, 16), (160, 2, 32, 32)])
def test_nor_do_they_in_a_model_of_bfloat16(
    unit: str, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(("HEADS", "KV_HEADS", "DIM", "SIZE"), shape, strict=True):
        monkeypatch.setitem(globals(), name, value)
    check_that_rows_stand_alone(bfloat16_case())
    test_a_model_of_bfloat16_stays_close(unit)


@pytest.mark.parametrize("row_bits", [0, 8, 16])
def test_int8_weights_stay_close(compiled: str, row_bits: int) -> None:
    case = Case(decoder_weights(varied_layers()))
    want = case.step(case.rows([(30, 30)]))
    small = int8_case(case, row_bits)
    got = small.step(small.rows([(30, 30)]))
    assert 0 < ((got - want).norm() / want.norm()).item() < 0.15


def int8_case(case: Case, row_bits: int) -> Case:
    """The same model with quantised matrices, and an empty cache."""
    small = ops.build_decoder(case.weights, torch.int8, row_bits)
    assert small is not None
    case.decoder = small
    case.kv.zero_()
    return case


@pytest.mark.parametrize("row_bits", [0, 8, 16])
def test_nor_do_they_with_int8_weights(unit: str, row_bits: int) -> None:
    case = int8_case(bfloat16_case() if row_bits == 8 else Case(), row_bits)
    check_that_rows_stand_alone(case)


BURST = 7


def burst_of(case: Case, chances: ops.Chances | None, steps: int = BURST) -> Tensor:
    """Three sequences of 30, 7 and 12 tokens go on in one call."""
    case.step(case.rows([(30, 30), (7, 7), (12, 12)]))
    r = case.rows([(1, 31), (1, 8), (1, 13)])
    told = case.decoder.burst(r.tokens, r.positions, r.slots, r.batch, case.kv, steps, chances, case.counts)
    assert told.plain_steps == steps
    return torch.tensor(told.tokens).t()


def one_by_one(case: Case, chances: ops.Chances | None) -> Tensor:
    """The definition of `burst_of`: a step, a draw, and so on."""
    case.step(case.rows([(30, 30), (7, 7), (12, 12)]))
    said = [tokens[:n] for tokens, n in zip(case.tokens, (31, 8, 13), strict=True)]
    drawn = []
    for step in range(BURST):
        logits = case.step(rows_of([(1, len(tokens)) for tokens in said], case.tables, said))
        if chances is None:
            drawn.append(logits.argmax(-1))
        else:
            how = (chances.temperature, chances.top_k, chances.top_p, chances.uniform[step])
            drawn.append(ops.sample(logits, *how))
        for tokens, token in zip(said, drawn[-1].tolist(), strict=True):
            tokens.append(token)
    return torch.stack(drawn)


def some_chances() -> ops.Chances:
    f64 = torch.float64
    top_k, uniform = torch.tensor([0, 0, 5]), torch.rand(BURST, 3, dtype=f64)
    return ops.Chances(
        torch.tensor([0.0, 0.8, 1.0], dtype=f64), top_k, torch.tensor([1.0, 0.9, 1.0], dtype=f64), uniform
    )


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_burst_equals_steps_and_draws(compiled: str, sampled: bool, threads: int) -> None:
    weights, chances = decoder_weights(), some_chances() if sampled else None
    torch.manual_seed(1)
    case = Case(weights)
    torch.manual_seed(1)
    again = Case(weights)
    torch.set_num_threads(threads)
    assert burst_of(case, chances).equal(one_by_one(again, chances))
    assert case.kv.equal(again.kv)
    assert case.counts.equal(again.counts)


def test_a_burst_ends_with_a_token_that_ends_a_sequence(compiled: str) -> None:
    weights = decoder_weights()
    torch.manual_seed(1)
    want = burst_of(Case(weights), None).t().tolist()
    for place in (0, 2, BURST - 1):
        last = want[1].index(want[1][place])  # where it is said first
        elsewhere = {token for token in range(1000) if token not in want[0]}
        torch.manual_seed(1)
        case = Case(weights)
        case.step(case.rows([(30, 30), (7, 7), (12, 12)]))
        r = case.rows([(1, 31), (1, 8), (1, 13)])
        rows = r.tokens, r.positions, r.slots, r.batch, case.kv
        told = case.decoder.burst(*rows, BURST, ends=[elsewhere, {10**6, want[1][place]}, ()])
        assert told.plain_steps == last + 1
        assert told.tokens == [said[: last + 1] for said in want]
    with pytest.raises(ValueError, match=r"^burst: ends must be of 3 sequences, got 1"):
        case.decoder.burst(*rows, BURST, ends=[()])


def test_a_burst_past_its_blocks_is_refused(case: Case) -> None:
    case.tables = [table[:8] for table in case.tables]  # of 4 tokens; the longest sequence has 31
    assert burst_of(case, None, 2).shape == (2, 3)
    with pytest.raises(ValueError, match=r"^burst: block_tables"):
        burst_of(case, None, 3)


def test_a_burst_of_what_is_not_single_rows_is_refused(case: Case) -> None:
    r = case.rows([(2, 2)])
    with pytest.raises(ValueError, match=r"^burst: takes single rows"):
        case.decoder.burst(r.tokens, r.positions, r.slots, r.batch, case.kv, 2)
    with pytest.raises(ValueError, match=r"^burst: takes single rows and at least one step"):
        burst_of(case, None, 0)


def test_chances_of_another_shape_are_named(case: Case) -> None:
    chances = some_chances()
    with pytest.raises(ValueError, match=r"^burst: uniform must be"):
        burst_of(case, chances, BURST + 1)
    with pytest.raises(ValueError, match=r"^burst: top_k must be"):
        burst_of(case, replace(chances, top_k=chances.top_k.int()))


def test_a_negative_slot_is_not_written(case: Case) -> None:
    rows = case.rows([(5, 5)])
    case.step(Rows(rows.tokens, rows.positions, torch.full((5,), -1), rows.batch, rows.logit_rows))
    assert case.kv.eq(0).all()


def test_rows_after_the_final_norm_are_told(case: Case) -> None:
    """All of them, whichever logits are wanted; threads and the rest of the step change nothing."""
    r = case.rows([(30, 30), (7, 7)])
    want = case.step(r)
    hidden = torch.empty(37, HIDDEN)
    torch.set_num_threads(2)
    for logit_rows in (r.logit_rows[:0], r.logit_rows[3:5]):
        got = case.decoder.step(r.tokens, r.positions, r.slots, r.batch, logit_rows, case.kv, hidden=hidden)
        assert got.equal(want[logit_rows])
        torch.testing.assert_close(hidden @ case.weights.head.t(), want, atol=2e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"^step: hidden must be"):
        case.decoder.step(r.tokens, r.positions, r.slots, r.batch, r.logit_rows, case.kv, hidden=hidden[1:])


def test_no_row_wants_logits(case: Case) -> None:
    r = case.rows([(5, 5)])
    assert case.step(Rows(r.tokens, r.positions, r.slots, r.batch, r.logit_rows[:0])).shape == (0, VOCAB)


FAULTS = {
    "tokens must be in the vocabulary": ("tokens", torch.tensor([0, VOCAB])),
    r"tokens must be \[2\] int64": ("tokens", torch.tensor([0.0, 1.0])),
    r"positions must be \[2\] int64": ("positions", torch.tensor([0])),
    "rows or positions out of range": ("positions", torch.tensor([0, LIMIT])),
    "slots must lie in the cache": ("slots", torch.tensor([0, 240])),
    "rows or positions": ("logit_rows", torch.tensor([2])),
    "block_tables": ("batch", ops.attention_batch([2], [2], [[60]], SIZE)),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_wrong_argument_is_named(case: Case, text: str) -> None:
    name, value = FAULTS[text]
    rows = case.rows([(2, 2)])
    fields = {field: getattr(rows, field) for field in ("tokens", "positions", "slots", "batch", "logit_rows")}
    with pytest.raises(ValueError, match=f"^step: {text}"):
        case.step(Rows(**{**fields, name: value}))


def test_a_wrong_cache_or_count_is_named(case: Case) -> None:
    rows = case.rows([(2, 2)])
    with pytest.raises(ValueError, match=r"^step: kv must be contiguous"):
        case.step(rows, case.kv[:2])
    with pytest.raises(ValueError, match=r"^step: kv must be contiguous"):
        case.step(rows, case.kv.double())
    case.counts = case.counts.int()
    with pytest.raises(ValueError, match=r"^step: expert_tokens"):
        case.step(rows)
