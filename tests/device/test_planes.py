"""The kernels that split and join byte planes give the bytes of the codec."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.cuda_emulator import Emulator

from tierfs.codec.planes.planes import PlaneOrder
from tierfs.device import planes
from tierfs.device.kernel_launch import KERNELS
from tierfs.device.planes import PlaneBlock, join_planes_reference, split_planes_reference
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import InvalidInputError

WIDTHS = (1, 2, 4, 8)
# Every combination that the format has: width, order, and whether there is a base.
KINDS = [
    (width, order, has_base)
    for width, has_base in itertools.product(WIDTHS, (False, True))
    for order in (PlaneOrder.AS_IT_IS, PlaneOrder.ZIGZAG if has_base else PlaneOrder.SIGN_LAST)
    if width > 1 or order is PlaneOrder.AS_IT_IS
]
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 256, 1000, 4096, 4099, 16384, 20011)
LONG = 1 << 15
KIND_IDS = [f"{width}-{order.name.lower()}-{'base' if has_base else 'alone'}" for width, order, has_base in KINDS]
CONTENTS = ("noise", "specials", "extremes", "near")
# The upper bits of signed zeros, infinities, quiet and signalling NaNs, denormals, and the largest and smallest normal
# numbers.
SPECIALS = (
    0x0000,
    0x8000,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC0,
    0x7F81,
    0xFFFF,
    0x7FFF,
    0x0001,
    0x8001,
    0x007F,
    0x0080,
    0x7F7F,
)
SPECIALS += (0x7FF0, 0xFFF0, 0x7FF8, 0x000F, 0x0010, 0x7FEF, 0x3F80, 0xBF80, 0x7C00, 0xFC00, 0x7E00, 0x03FF, 0x0400)
FILL = 0xA5


def content(kind, size, width, seed):
    """Return a block, and a base for it."""
    rng = np.random.default_rng(seed)
    count = size // width + 1
    raw, base = (rng.integers(0, 256, count * width, dtype=np.uint8) for _ in range(2))
    elements, others = raw.view(f"<u{width}"), base.view(f"<u{width}")
    if kind == "specials" and width > 1:
        for numbers in (elements, others):
            numbers.view("<u2")[width // 2 - 1 :: width // 2] = rng.choice(np.array(SPECIALS, "<u2"), count)
    elif kind == "extremes":
        # Borrows and carries into every byte, and out of the highest one.
        top = (1 << 8 * width) - 1
        ends = np.array([0, 1, top, top - 1, top >> 1, (top >> 1) + 1], f"<u{width}")
        elements[:], others[:] = rng.choice(ends, count), rng.choice(ends, count)
    elif kind == "near":
        others[:] = elements + rng.integers(-3, 4, count).astype(f"<i{width}").view(f"<u{width}")
    return raw[:size].tobytes(), base[:size].tobytes()


class Runner:
    """Runs the kernels on copies of blocks at given offsets from aligned addresses."""

    device = "cpu"

    def memory(self, data, offset):
        """Copy data to `offset` bytes behind an aligned address, between guard bytes.

        Returns:
            All of the memory, the start of the copy in it, and the copy.
        """
        whole = torch.full((len(data) + 96,), FILL, dtype=torch.uint8)
        start = -whole.data_ptr() % 16 + 16 + offset
        whole[start : start + len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[
            : len(data)
        ]
        whole = self.move(whole, start - offset)
        return whole, start, whole[start : start + len(data)]

    def move(self, whole, aligned):
        return whole

    def block(self, source, target_bytes, kind, base, offsets, *, is_split):
        """Return a block whose source is filled, and its target with the guard bytes around it."""
        width, order, has_base = kind
        source, target = self.memory(source, offsets[0])[2], self.memory(bytes([FILL]) * target_bytes, offsets[1])
        raw, parts = (source, target[2]) if is_split else (target[2], source)
        other = self.memory(base, offsets[2])[2] if has_base else None
        return PlaneBlock(raw, parts, width, order, other), target


class OnHost(Runner):
    """The emulator, which compiles the kernels for the CPU."""

    def __init__(self):
        self.emulator = Emulator(KERNELS / "planes.cu")

    def run(self, name, blocks):
        parts = planes.parts_of(blocks)
        arguments = [planes.table_of(blocks), np.uint32(parts)]
        self.emulator.launch(name, len(blocks) * parts, planes.THREADS, arguments)


class OnDevice(Runner):
    device = "cuda"

    def move(self, whole, aligned):
        moved = torch.empty(whole.numel() + 16, dtype=torch.uint8, device="cuda")
        shift = -(moved.data_ptr() + aligned) % 16
        moved[shift : shift + whole.numel()] = whole.cuda()
        return moved[shift : shift + whole.numel()]

    def run(self, name, blocks):
        getattr(planes, name)(blocks)
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=["emulator", "gpu"])
def runner(request):
    if request.param == "emulator":
        return OnHost()
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return OnDevice()


def bytes_of(tensor):
    return tensor.cpu().numpy().tobytes()


def split_and_join(runner, cases):
    """Compare both kernels with the codec on cases of (kind, raw, base, offsets), with one launch for each kernel."""
    splits, joins = [], []
    for kind, raw, base, offsets in cases:
        width, order, has_base = kind
        whole = len(raw) // width * width
        expected = split_planes_reference(raw, width, order, base if has_base else None)
        assert len(expected) == whole
        splits.append(runner.block(raw, whole, kind, base, offsets, is_split=True))
        joins.append(runner.block(expected, len(raw), kind, base, offsets, is_split=False))
        splits[-1] += (expected,)
        tail = raw[whole:]
        assert join_planes_reference(expected, width, order, base if has_base else None, tail) == raw
        joins[-1] += (raw[:whole] + bytes([FILL]) * len(tail),)
    for name, made in (("split_planes", splits), ("join_planes", joins)):
        runner.run(name, [block for block, _, _ in made])
        for (_, (whole, start, target), expected), (kind, raw, _, offsets) in zip(made, cases, strict=True):
            where = f"{name}, {kind}, {len(raw)} bytes at {offsets}"
            assert bytes_of(target) == expected, where
            around = bytes_of(whole[:start]) + bytes_of(whole[start + len(target) :])
            assert set(around) <= {FILL}, f"{where}: written outside"


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_planes_of_blocks_of_all_sizes_are_the_codecs(runner, kind):
    cases = []
    for seed, (size, what) in enumerate(itertools.product(SIZES, CONTENTS)):
        cases.append((kind, *content(what, size, kind[0], seed), (0, 0, 0)))
    split_and_join(runner, cases)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_planes_are_the_codecs_at_any_alignment(runner, kind):
    rng = np.random.default_rng(7)
    offsets = [(offset, 0, 0) for offset in range(16)] + [(0, offset, 0) for offset in range(16)]
    offsets += [(0, 0, offset) for offset in range(16)] + rng.integers(0, 16, (16, 3)).tolist()
    for before in range(0, 16, kind[0]):
        # Source and target are aligned behind the same number of elements. The base is aligned there or from its start.
        offsets += [(-(before // kind[0]) % 16, 16 - before, base) for base in (0, 16 - before)]
    cases = []
    for seed, each in enumerate(offsets):
        for size in (5, 640, 643):
            cases.append((kind, *content(CONTENTS[seed % 4], size, kind[0], seed), tuple(each)))
    split_and_join(runner, cases)


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_of_whole_blocks_are_the_codecs(runner, width):
    kinds = [kind for kind in KINDS if kind[0] == width]
    cases = [(kind, *content("specials", BLOCK_BYTES, width, 3), (0, 0, 0)) for kind in kinds]
    # A length that is a multiple of no alignment, and shorter than the others in the launch.
    cases.append((kinds[-1], *content("noise", BLOCK_BYTES - 4099, width, 4), (4, 8, 1)))
    split_and_join(runner, cases)


def test_one_launch_takes_blocks_of_all_kinds(runner):
    sizes = (0, 1, LONG, LONG - 1, 12345, 16)
    split_and_join(
        runner,
        [
            (kind, *content("extremes", sizes[seed % 6], kind[0], seed), (seed % 3, 0, seed % 5))
            for seed, kind in enumerate(KINDS + KINDS[::-1])
        ],
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_every_16_bit_pattern_survives(runner, width):
    # The patterns are the upper bits of the elements. The lower bits of the base borrow from them.
    upper = np.arange(1 << 16, dtype="<u2")
    lanes = np.full((upper.size, max(1, width // 2)), 0x1234, "<u2")
    lanes[:, -1] = upper
    raw = lanes.tobytes()[:BLOCK_BYTES]
    base = np.random.default_rng(1).bytes(len(raw))
    split_and_join(runner, [(kind, raw, base, (0, 0, 0)) for kind in KINDS if kind[0] == width])


def test_an_empty_launch_does_nothing():
    planes.split_planes([])
    planes.join_planes([])


def test_blocks_in_host_memory_are_not_launched():
    raw = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(InvalidInputError, match="CUDA"):
        planes.split_planes([PlaneBlock(raw, raw.clone(), 4)])


@pytest.mark.parametrize(
    ("width", "order", "has_base"),
    [
        (3, PlaneOrder.AS_IT_IS, False),
        (1, PlaneOrder.SIGN_LAST, False),
        (1, PlaneOrder.ZIGZAG, True),
        (4, PlaneOrder.ZIGZAG, False),
        (4, PlaneOrder.SIGN_LAST, True),
    ],
)
def test_orders_that_the_format_lacks_are_refused(width, order, has_base):
    raw = torch.zeros(24, dtype=torch.uint8)
    with pytest.raises(InvalidInputError):
        PlaneBlock(raw, raw.clone(), width, order, raw.clone() if has_base else None)
    with pytest.raises(InvalidInputError):
        split_planes_reference(bytes(24), width, order, bytes(24) if has_base else None)


@pytest.mark.parametrize(
    ("raw", "parts", "base"),
    [
        (torch.zeros(BLOCK_BYTES + 4, dtype=torch.uint8), torch.zeros(BLOCK_BYTES + 4, dtype=torch.uint8), None),
        (torch.zeros(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8), None),
        (torch.zeros(8, dtype=torch.int8), torch.zeros(8, dtype=torch.uint8), None),
        (torch.zeros(16, dtype=torch.uint8)[::2], torch.zeros(8, dtype=torch.uint8), None),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)),
    ],
    ids=["too-long", "planes-with-tail", "no-bytes", "strided", "short-base"],
)
def test_blocks_of_wrong_sizes_are_refused(raw, parts, base):
    with pytest.raises(InvalidInputError):
        PlaneBlock(raw, parts, 4, base=base)
