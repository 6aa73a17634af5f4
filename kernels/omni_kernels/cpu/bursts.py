"""The C structures of a burst: made of its drafts and chances, and read back."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from ctypes import POINTER, Array, cast
from itertools import accumulate

import torch

from omni_kernels.cpu import native
from omni_kernels.decoder import Chances
from omni_kernels.drafts import Burst, DraftLuck, DraftPolicy, Drafts


def draws_of(chances: Chances, tokens: int, sequences: int) -> native.Draws:
    """The C structure, which must not outlive them."""
    kinds = {"temperature": torch.float64, "top_k": torch.int64, "top_p": torch.float64, "uniform": torch.float64}
    for name, dtype in kinds.items():
        value, want = getattr(chances, name), (tokens, sequences) if name == "uniform" else (sequences,)
        if value.shape != want or value.dtype != dtype or not value.is_contiguous():
            raise ValueError(f"burst: {name} must be {want} {dtype}, got {value.dtype} {tuple(value.shape)}")
    return native.Draws(*(getattr(chances, name).data_ptr() for name in kinds))


def policy_of(policy: DraftPolicy) -> native.Policy:
    """The C structure."""
    pauses = policy.first_pause, policy.longest_pause
    return native.Policy(policy.gram, policy.longest, *pauses, policy.learn, policy.share)


def said_of(luck: DraftLuck, most: int) -> native.Said:
    """The C structure of one sequence, which must not outlive its text."""
    text = luck.text
    if text.typecode != "i" or text.itemsize != 4:
        raise ValueError(f"burst: a text must be an array of int32, got {text.typecode!r}")
    address, length = text.buffer_info()
    return native.Said(address, length, most, luck.pause, luck.resumes_at, luck.rate)


def take_back(said: native.Said, luck: DraftLuck) -> None:
    """What was learned."""
    luck.pause, luck.resumes_at, luck.rate = said.pause, said.resumes_at, said.rate


class DraftState:
    """The C structures of drafts; they point to the texts, which must not change meanwhile."""

    def __init__(self, drafts: Drafts, most: Sequence[int]) -> None:
        if drafts.policy.longest < 1 or drafts.policy.gram < 1 or drafts.rows < 0:
            raise ValueError("burst: a draft needs a gram and a token")
        if len(drafts.lucks) != len(most):
            raise ValueError(f"burst: drafts must be of {len(most)} sequences, got {len(drafts.lucks)}")
        self._lucks = drafts.lucks
        said = [said_of(luck, n) for luck, n in zip(drafts.lucks, most, strict=True)]
        self._said: Array[native.Said] = (native.Said * len(said))(*said)
        first = cast(self._said, POINTER(native.Said))
        self.native = native.Drafts(policy_of(drafts.policy), first, drafts.rows, drafts.limit_s)

    def take_back(self) -> None:
        """What was learned."""
        for said, luck in zip(self._said, self._lucks, strict=True):
            take_back(said, luck)


class EndTokens:
    """The C structure of the tokens that end each sequence."""

    def __init__(self, ends: Sequence[Collection[int]]) -> None:
        self._tokens = array("q", [token for one in ends for token in one])
        self._start = array("q", [0, *accumulate(map(len, ends))])
        self.native = native.Ends(self._tokens.buffer_info()[0], self._start.buffer_info()[0])


class Told:
    """Room for what a burst tells."""

    def __init__(self, sequences: int, steps: int, width: int) -> None:
        self._tokens = array("q", bytes(8 * sequences * width))
        self._counts = array("q", bytes(8 * sequences))
        self._fared = array("i", bytes(4 * 2 * steps * sequences))
        addresses = (one.buffer_info()[0] for one in (self._tokens, self._counts, self._fared))
        self.native = native.Told(width, *addresses)

    def read(self) -> Burst:
        """After the call."""
        told, count, width = self.native, len(self._counts), self.native.width
        tokens = [self._tokens[i * width : i * width + n].tolist() for i, n in enumerate(self._counts)]
        if told.plain_steps == told.steps:
            return Burst(tokens, [[(0, 0)] * told.steps] * count, told.steps, told.plain_s, 0, 0.0, 0)
        fared = self._fared[: 2 * told.steps * count]
        drafted, right = fared[::2], fared[1::2]
        each = [list(zip(drafted[i::count], right[i::count], strict=True)) for i in range(count)]
        drafting = told.steps - told.plain_steps
        return Burst(tokens, each, told.plain_steps, told.plain_s, drafting, told.drafted_s, sum(drafted))
