"""Memory for weights: what it gives out is apart, begins cache lines, and is kept by who holds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

import omni_kernels as ops
from omni_kernels.cpu.arena import CHUNK, PAGE, Arena
from omni_kernels.cpu.native import find_library


@pytest.fixture
def arena() -> Arena:
    library, why = find_library()
    if library is None:
        pytest.skip(why)
    return Arena(library)


def test_matrices_lie_apart_and_begin_a_line(arena: Arena) -> None:
    sizes = [1, 64, 100, PAGE, CHUNK // 2, CHUNK // 2 - 7, 63, CHUNK // 2 + 1, 3 * CHUNK, 5]
    taken = [arena.take(size) for size in sizes]
    places = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one in taken)
    assert [one.numel() for one in taken] == sizes
    assert all(begin % 64 == 0 for begin, _ in places)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    for number, one in enumerate(taken):
        one.fill_(number)
    assert all(bool((one == number).all()) for number, one in enumerate(taken))


def test_small_ones_share_a_large_page_and_large_ones_begin_one(arena: Arena) -> None:
    small = [arena.take(1000) for _ in range(3)]
    assert small[0].data_ptr() % PAGE == 0
    assert small[2].data_ptr() - small[0].data_ptr() == 2 * 1024
    large = arena.take(CHUNK)
    assert large.data_ptr() % PAGE == 0
    assert arena.take(8).data_ptr() - small[2].data_ptr() == 1024, "the chunk goes on behind a large one"


def test_a_chunk_is_kept_by_what_lies_in_it(arena: Arena) -> None:
    first = arena.take(100)
    kept = first.untyped_storage()
    first.fill_(7)
    rest = [arena.take(CHUNK // 2) for _ in range(4)]
    assert all(one.untyped_storage().data_ptr() != kept.data_ptr() for one in rest[1:])
    del rest, arena
    assert bool((first == 7).all())


def test_threads_are_given_places_of_their_own(arena: Arena) -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(arena.take, [4096] * 20_000))
    places = sorted(one.data_ptr() for one in taken)
    assert all(before + 4096 <= after for before, after in pairwise(places))


def test_packed_weights_come_from_it() -> None:
    w = torch.randn(3, 48, 40)
    packed = [ops.pack(w[i]) for i in range(3)]
    if packed[0].backend != "cpu":
        pytest.skip("no compiled kernels here")
    x = torch.randn(5, 40)
    for i in range(3):
        assert packed[i].data.data_ptr() % 64 == 0
        torch.testing.assert_close(ops.linear(x, packed[i]), x @ w[i].T)
