"""Qwen3-MoE for training on a few CPU cores: the same function as transformers', computed in fewer, larger steps.

Weights are fp32, matrix products run in bf16 (which AMX does an order of magnitude faster). Experts see their tokens
sorted, and the backward pass of the whole expert block is written out, because autograd's slices and concatenations
would cost more than the products. `to_hugging_face` gives the tensors the names that every engine loads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """What config.json says about the sizes."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 16
    experts_per_token: int = 2
    expert_width: int = 128
    max_positions: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    aux_loss: float = 0.01

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


class Experts(torch.autograd.Function):
    """Sum over a token's experts of weight * down(silu(gate) * up), forward and backward.

    Choices are sorted by expert and each expert's rows rounded up to a multiple of STEP, so that an expert is one
    product over neighbouring rows and few sizes occur (oneDNN compiles a kernel for every new size). `source[row]` is
    the choice that a row computes, or the choice n*k, which stands for "nobody's": its token is a row of zeros.
      rows   |e0 e0 e0 pad|e1 pad pad pad|e2 ...        slot[choice] = row
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        (n, h), k, width = x.shape, chosen.shape[1], down.shape[2]
        slot, source, ends = seat(chosen.flatten(), down.shape[0])
        rows = with_zero_row(x).index_select(0, source // k)
        hidden, out = x.new_empty(len(source), 2 * width), x.new_empty(len(source), h)
        for e, (i, j) in enumerate(spans(ends)):
            torch.mm(rows[i:j], gate_up[e].t(), out=hidden[i:j])
        act = F.silu(hidden[:, :width]).mul_(hidden[:, width:])
        for e, (i, j) in enumerate(spans(ends)):
            torch.mm(act[i:j], down[e].t(), out=out[i:j])
        ctx.save_for_backward(rows, hidden, act, out, weight, slot, source, gate_up, down)
        ctx.ends = ends
        return torch.bmm(weight.unsqueeze(1), out.index_select(0, slot).view(n, k, h)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, act, out, weight, slot, source, gate_up, down = ctx.saved_tensors
        (n, k), h, width = weight.shape, rows.shape[1], down.shape[2]
        arriving = with_zero_row(grads[0]).index_select(0, source // k)
        d_weight = (arriving * out).sum(-1, dtype=torch.float32).index_select(0, slot).view(n, k)
        d_out = arriving.mul_(F.pad(weight.flatten(), (0, 1)).index_select(0, source).unsqueeze(-1))
        d_act, d_rows, d_hidden = torch.empty_like(act), torch.empty_like(rows), torch.empty_like(hidden)
        d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        for e, (i, j) in enumerate(spans(ctx.ends)):
            torch.mm(d_out[i:j], down[e], out=d_act[i:j])
            torch.mm(d_out[i:j].t(), act[i:j], out=d_down[e])
        gate, up = hidden[:, :width], hidden[:, width:]
        d_hidden[:, width:] = d_act * F.silu(gate)
        d_hidden[:, :width] = torch.ops.aten.silu_backward(d_act.mul_(up), gate)
        for e, (i, j) in enumerate(spans(ctx.ends)):
            torch.mm(d_hidden[i:j], gate_up[e], out=d_rows[i:j])
            torch.mm(d_hidden[i:j].t(), rows[i:j], out=d_gate_up[e])
        d_x = d_rows.index_select(0, slot).view(n, k, h).sum(1)
        return d_x, d_weight.to(weight.dtype), None, d_gate_up, d_down


STEP: Final = 64


def seat(choices: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """The row of each choice, the choice of each row, and where each expert's rows end."""
    counts = torch.bincount(choices, minlength=experts)
    ends = ((counts + STEP - 1) // STEP * STEP).cumsum(0)
    order = torch.argsort(choices, stable=True)
    skipped = ends.roll(1).index_fill(0, torch.tensor([0]), 0) - (counts.cumsum(0) - counts)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(len(order)) + skipped.repeat_interleave(counts)
    source = torch.full((int(ends[-1]),), len(order))
    source[slot] = torch.arange(len(order))
    return slot, source, ends.tolist()


def with_zero_row(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def spans(ends: list[int]) -> Iterator[tuple[int, int]]:
    """Half-open row ranges, one an expert: [0, ends[0]), [ends[0], ends[1]), ..."""
    start = 0
    for end in ends:
        yield start, end
        start = end


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        deep = (2 * s.layers) ** -0.5
        self.q, self.k, self.v = matrix(wide, s.hidden), matrix(narrow, s.hidden), matrix(narrow, s.hidden)
        self.o = matrix(s.hidden, wide, scale=deep)
        self.router = matrix(s.experts, s.hidden)
        self.gate = matrix(s.experts, s.expert_width, s.hidden)
        self.up = matrix(s.experts, s.expert_width, s.hidden)
        self.down = matrix(s.experts, s.hidden, s.expert_width, scale=deep)
        self.norm_in, self.norm_post = ones(s.hidden), ones(s.hidden)
        self.norm_q, self.norm_k = ones(s.head_dim), ones(s.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(rms_norm(x, self.norm_in, self.s.norm_eps), cos, sin)
        y, balance = self.mix(rms_norm(x, self.norm_post, self.s.norm_eps))
        return x + y, balance

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        s = self.s
        q = linear(x, self.q).view(b, t, s.heads, s.head_dim)
        k = linear(x, self.k).view(b, t, s.kv_heads, s.head_dim)
        v = linear(x, self.v).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        q = rotate(rms_norm(q, self.norm_q, s.norm_eps), cos, sin).transpose(1, 2)
        k = rotate(rms_norm(k, self.norm_k, s.norm_eps), cos, sin).transpose(1, 2)
        y = attention(q, k, v)
        return linear(y.transpose(1, 2).reshape(b, t, -1), self.o)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        s = self.s
        flat = x.reshape(-1, s.hidden)
        probability = linear(flat, self.router).float().softmax(-1)
        weight, chosen = probability.topk(s.experts_per_token, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        gate_up = torch.cat([self.gate, self.up], dim=1).to(x.dtype)
        y: Tensor = apply(Experts, flat, weight.to(x.dtype), chosen, gate_up, self.down.to(x.dtype))
        share = torch.bincount(chosen.flatten(), minlength=s.experts) / chosen.numel()
        return y.view_as(x), s.experts * (share * probability.mean(0)).sum()


class DemoModel(nn.Module):
    """Token ids in, loss out; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * shape.hidden**-0.5)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = ones(shape.hidden)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Last hidden states [b, t, hidden] and the mean balance loss of the layers (1 is even)."""
        cos, sin = rotary(ids.shape[1], self.shape, dtype)
        x = F.embedding(ids, self.embed).to(dtype)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        return rms_norm(x, self.norm, self.shape.norm_eps), torch.stack(balances).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.embed)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, grouped. Short rows as plain products (AMX), longer ones through the fused fp32 kernel, whose backward
    is several times faster on CPU than its bf16 one."""
    (b, heads, t, d), groups = q.shape, k.shape[1]
    if t > 192:
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
        return y.to(q.dtype)
    k, v = k.reshape(b * groups, t, d), v.reshape(b * groups, t, d)
    scores = torch.bmm(q.reshape(b * groups, heads // groups * t, d), k.mT * d**-0.5)
    future = torch.full((t, t), -1e4, dtype=q.dtype).triu(1)
    weight = (scores.view(b * groups, heads // groups, t, t) + future).softmax(-1)
    return torch.bmm(weight.view(b * groups, -1, t), v).view(b, heads, t, d)


def matrix(*size: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * scale * size[-1] ** -0.5)


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight, both ways written out: autograd would make a dozen passes over memory of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps)).to(x.dtype)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        width = unit.shape[-1]
        d_scaled = (grads[0] * unit).reshape(-1, width)
        d_weight = torch.mv(d_scaled.t(), d_scaled.new_ones(len(d_scaled)))
        d_unit = grads[0] * weight
        along = torch.mv((d_unit * unit).reshape(-1, width), unit.new_full((width,), 1 / width))
        return d_unit.sub_(unit * along.view(scale.shape)).mul_(scale), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return apply(RmsNorm, x, weight.to(x.dtype), eps)


def apply(function: Any, *args: Any) -> Tensor:
    """`function.apply`, whose type torch does not tell."""
    result: Tensor = function.apply(*args)
    return result


def rotary(length: int, s: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rate = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angle = torch.arange(length).float()[:, None] * rate
    angle = torch.cat([angle, angle], dim=-1)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def named_tensors(model: DemoModel) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of a Qwen3-MoE checkpoint: per-expert matrices, the tied output left out."""
    yield from (("model.embed_tokens.weight", model.embed), ("model.norm.weight", model.norm))
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        at = f"model.layers.{number}."
        yield f"{at}input_layernorm.weight", layer.norm_in
        yield f"{at}post_attention_layernorm.weight", layer.norm_post
        yield f"{at}self_attn.q_norm.weight", layer.norm_q
        yield f"{at}self_attn.k_norm.weight", layer.norm_k
        yield f"{at}mlp.gate.weight", layer.router
        yield from ((f"{at}self_attn.{n}_proj.weight", getattr(layer, n)) for n in "qkvo")
        for part in ("gate", "up", "down"):
            for e, matrix_of in enumerate(getattr(layer, part)):
                yield f"{at}mlp.experts.{e}.{part}_proj.weight", matrix_of


def to_hugging_face(model: DemoModel) -> dict[str, Tensor]:
    return {name: t.detach().to(torch.bfloat16).clone().contiguous() for name, t in named_tensors(model)}


@torch.no_grad()
def from_hugging_face(model: DemoModel, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in named_tensors(model):
        tensor.copy_(tensors[name])
