"""What the ops of `api.py` ask of their arguments: a ValueError that names op and argument, in one line."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_kernels import registry
from omni_kernels.registry import TORCH, Op


def op_of(name: str, on: Tensor, *others: Tensor | None) -> Op:
    """The backend's function; the definition where a gradient is wanted."""
    found = registry.find(name, on.device.type)
    if found is None:
        raise ValueError(f"{name}: no backend for device {on.device.type}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (on, *others)):
        return TORCH[name]
    return found


def require(holds: bool, op: str, argument: str, why: str, got: object) -> None:
    """Raise unless it holds."""
    if not holds:
        raise ValueError(f"{op}: {argument} {why}, got {got}")


def floats(op: str, argument: str, x: Tensor, like: Tensor | None = None) -> None:
    """`x` must be floating, and of the dtype and device of `like`."""
    if like is None:
        if not x.is_floating_point():
            require(False, op, argument, "must be floating", x.dtype)
    elif x.dtype != like.dtype:
        require(False, op, argument, f"must be {like.dtype}", x.dtype)
    elif x.device != like.device:
        require(False, op, argument, f"must be on {like.device}", x.device)


def integers(op: str, argument: str, x: Tensor, on: Tensor | None = None) -> None:
    """`x` must be whole numbers, on the device of `on`."""
    require(x.dtype in (torch.int64, torch.int32), op, argument, "must be int64 or int32", x.dtype)
    if on is not None:
        beside(op, argument, x, on)


def beside(op: str, argument: str, x: Tensor, on: Tensor) -> None:
    """`x` must be on the device of `on`."""
    if x.device != on.device:
        require(False, op, argument, f"must be on {on.device}", x.device)


def shares(op: str, argument: str, x: Tensor, on: Tensor) -> None:
    """`x` must be floating, of any width, on the device of `on`."""
    require(x.is_floating_point(), op, argument, "must be floating", x.dtype)
    beside(op, argument, x, on)


def check_choice(op: str, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Experts and their weights for every row of `x`."""
    if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        require(False, op, "ids", f"must be [{x.shape[0]}, K]", ids.shape)
    if weights.shape != ids.shape:
        require(False, op, "weights", f"must be {tuple(ids.shape)}", weights.shape)
    shares(op, "weights", weights, x)
    integers(op, "ids", ids, x)


def check_ids(op: str, experts: int, ids: Tensor) -> None:
    """On the CPU only: asking a device would wait for it."""
    if ids.numel() and ids.device.type == "cpu":
        low, high = (int(edge) for edge in torch.aminmax(ids))
        inside = low >= -1 and high < experts
        require(inside, op, "ids", f"must be in -1..{experts - 1}", f"{low}..{high}")
