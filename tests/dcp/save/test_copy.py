"""Ranges of memory are copied byte for byte: large ones in a few long pieces, and no byte beside them changes."""

import numpy as np
import pytest
import torch

from tierfs import kernels
from tierfs.dcp.save import copy as copying
from tierfs.dcp.save.copy import LARGE_BYTES, copy_ranges

GUARD = 64


@pytest.fixture(params=["kernels", "memcpy"])
def pieces(request, monkeypatch, with_processors):
    """The lengths of the large pieces, in the order in which they are copied."""
    if request.param == "kernels" and kernels.active is None:
        pytest.skip(f"kernels: {kernels.status()}")
    with_processors(3)
    if request.param == "memcpy":
        monkeypatch.setattr(kernels, "active", None)
    lengths, real = [], copying.copy_piece

    def copy(to, begin, length):
        lengths.append(length)
        real(to, begin, length)

    monkeypatch.setattr(copying, "copy_piece", copy)
    return lengths


def copied(lengths):
    """Copy random sources. Return the targets with the guard bytes around each, and the sources."""
    noise = np.random.default_rng(1)
    sources = [torch.from_numpy(noise.integers(256, size=length, dtype=np.uint8)) for length in lengths]
    around = [torch.full((GUARD + length + GUARD,), 7, dtype=torch.uint8) for length in lengths]
    rows = [
        (memory.data_ptr() + GUARD, source.data_ptr(), len(source))
        for memory, source in zip(around, sources, strict=True)
    ]
    copy_ranges(np.array(rows, np.uint64).reshape(-1, 3))
    return around, sources


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [1],
        [LARGE_BYTES],
        [LARGE_BYTES + 1, 3 * LARGE_BYTES - 1],
        [40 * LARGE_BYTES + 5],
        [LARGE_BYTES + number for number in range(50)],
        [1 + 37 * number for number in range(1000)],
        [5, LARGE_BYTES, 7, LARGE_BYTES - 1, 9],
    ],
)
def test_all_is_copied_and_nothing_beside_it(pieces, lengths):
    around, sources = copied(lengths)
    for memory, source in zip(around, sources, strict=True):
        assert torch.equal(memory[GUARD:-GUARD], source)
        assert bool((memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all())
    assert sum(pieces) == sum(length for length in lengths if length >= LARGE_BYTES)


def test_the_kernels_copy_16_mib_at_a_time_and_memcpy_a_sixth_on_three_threads(pieces, request):
    copied([60 * LARGE_BYTES])
    if "kernels" in request.node.name.partition("[")[2]:
        assert sorted(pieces) == [12 * LARGE_BYTES, *[16 * LARGE_BYTES] * 3]
    else:
        assert sorted(pieces) == [10 * LARGE_BYTES] * 6


def test_scattered_tensors_are_copied_piece_by_piece(pieces):
    copied([4 * LARGE_BYTES] * 12)
    assert pieces == [4 * LARGE_BYTES] * 12
