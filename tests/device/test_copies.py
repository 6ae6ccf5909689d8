"""Many copies in one launch write every byte of the targets, and no byte beside them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.cuda_emulator import Emulator

from tierfs.device.kernel_launch import KERNELS, PIECE_BYTES, copy_pieces, piece_table

LENGTHS = [0, 1, 3, 4, 15, 16, 17, 4095, 4096, 100_003, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 5]


@pytest.mark.parametrize(("to", "begin"), [(0, 0), (0, 4), (3, 0), (8, 24), (5, 5)])
def test_every_byte_is_copied_and_none_beside(to, begin):
    emulator = Emulator(KERNELS / "copy.cu")
    rng = np.random.default_rng(1)
    memory = [rng.integers(0, 256, length + 64, np.uint8) for length in LENGTHS]
    target = [np.full(length + 64, 7, np.uint8) for length in LENGTHS]
    at = [(-array.ctypes.data) % 16 + begin for array in memory]
    into = [(-array.ctypes.data) % 16 + to for array in target]
    copies = [
        (one.ctypes.data + stop, other.ctypes.data + start, length)
        for one, stop, other, start, length in zip(target, into, memory, at, LENGTHS, strict=True)
    ]
    table = piece_table(copies)
    emulator.launch("copy_pieces", len(table), 32, (table,))
    for length, source, copy, start, stop in zip(LENGTHS, memory, target, at, into, strict=True):
        assert np.array_equal(copy[stop : stop + length], source[start : start + length])
        assert (copy[:stop] == 7).all()
        assert (copy[stop + length :] == 7).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_every_byte_is_copied_on_a_gpu():
    pytest.importorskip("cupy")
    sources = [torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda") for length in LENGTHS]
    targets = [torch.zeros_like(source) for source in sources]
    copies = [(to.data_ptr(), begin.data_ptr(), to.nbytes) for to, begin in zip(targets, sources, strict=True)]
    copy_pieces(copies, torch.device("cuda", 0))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
