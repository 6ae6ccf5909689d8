"""Digests of blocks by the kernels, emulated and on a GPU, against the xxhash library."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import numpy as np
import pytest
import torch
import xxhash
from support.cuda_emulator import Emulator

from tierfs.device.kernel_launch import KERNELS, cut_blocks, function, hash_blocks
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import InvalidInputError

NO_GPU = not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None
NARROW, WIDE = "xxh3_128_blocks", "xxh3_128_blocks_wide"
NOISE = np.random.default_rng(46).integers(0, 256, BLOCK_BYTES + 64, dtype=np.uint8)

# Lengths around each multiple of a stripe in three rows, around each row up to the wide kernel's second round, and
# around a block's end.
EDGES = sorted(
    {step + offset for step in range(64, 3 * 1024 + 1, 64) for offset in (-1, 0, 1)}
    | {step + offset for step in range(1024, 70 * 1024 + 1, 1024) for offset in (-1, 0, 1)}
)
BLOCK_ENDS = [BLOCK_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES - 63, BLOCK_BYTES - 64, BLOCK_BYTES - 1024]


class Emulated:
    """A kernel on the emulated GPU."""

    def __init__(self, kernel, *, reverse=False):
        self.kernel, self.reverse = kernel, reverse

    def digests(self, data, starts, lengths):
        buffer = aligned(data)
        addresses = np.asarray(starts, np.uint64) + np.uint64(buffer.ctypes.data)
        out = aligned(np.full(16 * len(addresses), 0xEE, np.uint8))
        threads = 256 if self.kernel == WIDE else 32
        arguments = [addresses, np.asarray(lengths, np.uint32), np.uint32(len(addresses)), out]
        emulator().launch(self.kernel, len(addresses), threads, arguments, reverse=self.reverse)
        return out.tobytes()


class OnGpu:
    """`hash_blocks`, which tierfs calls, on the first GPU."""

    def digests(self, data, starts, lengths):
        held = torch.from_numpy(data).cuda()
        addresses = np.asarray(starts, np.uint64) + np.uint64(held.data_ptr())
        return hash_blocks(addresses, np.asarray(lengths, np.uint32), held.device).cpu().numpy().tobytes()


@cache
def emulator():
    return Emulator(KERNELS / "xxh3.cu")


def aligned(data):
    """Return a copy that starts at a multiple of 256, as torch's GPU memory does."""
    room = np.empty(len(data) + 256, np.uint8)
    start = -room.ctypes.data % 256
    room[start : start + len(data)] = data
    return room[start : start + len(data)]


@pytest.fixture(
    params=[
        pytest.param(Emulated(NARROW), id="emulated"),
        pytest.param(Emulated(NARROW, reverse=True), id="emulated-reverse"),
        pytest.param(Emulated(WIDE), id="emulated-wide"),
        pytest.param(Emulated(WIDE, reverse=True), id="emulated-wide-reverse"),
        pytest.param(
            OnGpu(),
            id="gpu",
            marks=[pytest.mark.cuda, pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU and CuPy")],
        ),
    ]
)
def device(request):
    return request.param


def expect_digests(device, data, starts, lengths):
    found = device.digests(data, starts, lengths)
    expected = [
        xxhash.xxh3_128_digest(data[start : start + length]) for start, length in zip(starts, lengths, strict=True)
    ]
    wrong = [
        (start, length)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
        if found[16 * index : 16 * index + 16] != expected[index]
    ]
    assert len(found) == 16 * len(lengths)
    assert not wrong, f"{len(wrong)} wrong digests; (start, length): {wrong[:10]}"


def test_every_short_length_has_its_digest(device):
    lengths = list(range(1101))
    expect_digests(device, NOISE, [0] * len(lengths), lengths)


def test_lengths_around_stripes_and_rows_are_right(device):
    expect_digests(device, NOISE, [0] * len(EDGES), EDGES)


def test_whole_blocks_are_right(device):
    expect_digests(device, NOISE, [0] * len(BLOCK_ENDS), BLOCK_ENDS)


def test_misaligned_blocks_are_right(device):
    lengths = [0, 1, 3, 7, 12, 16, 100, 128, 200, 240, 241, 1023, 1024, 1025, 2049, 5000, 33 * 1024 + 17]
    pairs = [(start, length) for start in range(1, 16) for length in lengths]
    expect_digests(device, NOISE, *zip(*pairs, strict=True))


def test_a_misaligned_whole_block_is_right(device):
    expect_digests(device, NOISE, [1, 2, 4, 8, 13], [BLOCK_BYTES] * 5)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x80, 0xFF])
def test_equal_bytes_have_their_digest(device, byte):
    lengths = [0, 1, 2, 3, 4, 8, 9, 16, 17, 96, 128, 129, 240, 241, 1024, 1025, 4096, 70_001]
    expect_digests(device, np.full(70_016, byte, np.uint8), [0] * len(lengths), lengths)


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFF7FFF, 0x80000000])
def test_bits_of_not_a_number_are_kept(device, pattern):
    data = np.full(9000, pattern, np.uint32).view(np.uint8)
    expect_digests(device, data, [0, 0, 4, 2], [16, 36_000, 35_000, 241])


def test_many_blocks_of_one_launch_are_independent(device):
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 3000, 600)
    starts = rng.integers(0, BLOCK_BYTES - 3000, 600)
    expect_digests(device, NOISE, starts.tolist(), lengths.tolist())


def test_no_digest_is_written_behind_the_last():
    data, out = aligned(NOISE[:4096]), aligned(np.full(64, 0xEE, np.uint8))
    arguments = [np.array([data.ctypes.data] * 2, np.uint64), np.array([4096, 7], np.uint32), np.uint32(2), out]
    emulator().launch(NARROW, 3, 128, arguments)
    digests = [xxhash.xxh3_128_digest(some) for some in (data, data[:7])]
    assert out.tobytes() == b"".join(digests) + b"\xee" * 32


def test_a_region_is_cut_into_whole_blocks_and_a_rest():
    addresses, lengths = cut_blocks(1 << 40, 2 * BLOCK_BYTES + 5)
    assert addresses.dtype == np.uint64
    assert lengths.dtype == np.uint32
    assert addresses.tolist() == [1 << 40, (1 << 40) + BLOCK_BYTES, (1 << 40) + 2 * BLOCK_BYTES]
    assert lengths.tolist() == [BLOCK_BYTES, BLOCK_BYTES, 5]


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 16 * BLOCK_BYTES])
def test_blocks_cover_their_region(length):
    addresses, lengths = cut_blocks(4096, length)
    assert len(addresses) == -(-length // BLOCK_BYTES)
    assert lengths.sum() == length


def test_a_kernel_without_cupy_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidInputError, match=r"tierfs\[gpu\]"):
        function(NARROW, "xxh3")


@pytest.mark.cuda
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU and CuPy")
def test_either_kernel_of_a_gpu_gives_the_digests():
    # A GPU's number of multiprocessors decides which kernel hashes a given number of blocks.
    data, length = torch.from_numpy(NOISE).cuda(), 64 << 10
    for count in (1, 3, 4096):
        addresses, lengths = np.full(count, data.data_ptr(), np.uint64), np.full(count, length, np.uint32)
        found = hash_blocks(addresses, lengths, data.device).cpu().numpy().tobytes()
        assert found == xxhash.xxh3_128_digest(NOISE[:length]) * count
