"""The compiled loops give the same bytes as numpy, and refuse the same input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs import kernels
from tierfs.codec import Codec, Coding, decode_block, encode_block
from tierfs.codec.planes import PlaneOrder, counts_of_planes
from tierfs.errors import TierfsError

compiled = kernels.active
pytestmark = pytest.mark.skipif(compiled is None, reason=f"kernels: {kernels.status()}")

WIDTHS = (1, 2, 4, 8)


def numbers(seed: int, kind: str, size: int) -> bytes:
    """Return bytes that the codecs turn into planes of every mode."""
    rng = np.random.default_rng(seed)
    count = size // 8 + 1
    made = {
        "float": lambda: (rng.standard_normal(2 * count) * 0.02).astype(np.float32),
        "bfloat": lambda: (rng.standard_normal(4 * count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "positive": lambda: np.square(rng.standard_normal(2 * count)).astype(np.float32),
        "few": lambda: rng.choice([0, 0, 0, 7], 2 * count).astype(np.uint32),
        "rare": lambda: np.where(rng.random(2 * count) < 0.01, rng.integers(0, 1 << 31, 2 * count), 5).astype(
            np.uint32
        ),
        "noise": lambda: rng.integers(0, 256, 8 * count).astype(np.uint8),
        "seven": lambda: rng.integers(0, 128, 8 * count).astype(np.uint8),
        "small": lambda: rng.integers(0, 100, count).astype(np.uint64),
        "zero": lambda: np.zeros(count, np.uint64),
        "nan": lambda: rng.choice([np.nan, -np.nan, np.inf, -0.0, 1.5], 2 * count).astype(np.float32),
    }[kind]()
    return made.tobytes()[:size]


KINDS = ("float", "bfloat", "positive", "few", "rare", "noise", "seven", "small", "zero", "nan")
SIZES = st.one_of(st.integers(1, 300), st.integers(16_000, 140_000), st.sampled_from([1 << 17, 1 << 20, (1 << 20) - 3]))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    size=SIZES,
    width=st.sampled_from(WIDTHS),
    codec=st.sampled_from([Codec.PLANE, Codec.DPLANE, Codec.SPARSE]),
    change=st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
    offset=st.integers(0, 7),
)
def test_kernels_write_and_read_the_bytes_of_numpy(seed, kind, size, width, codec, change, offset):
    raw = bytes(offset) + numbers(seed, kind, size)
    rng = np.random.default_rng(seed)
    base = np.frombuffer(raw, np.uint8).copy()
    differs = rng.random(base.size) < change
    base[differs] += rng.integers(0, 3, int(differs.sum())).astype(np.uint8)
    view, reference = memoryview(raw)[offset:], memoryview(base.data)[offset:]
    outs = []
    for active in (compiled, None):
        kernels.active = active
        try:
            out = bytearray(len(view))
            found, length = encode_block(view, Coding(codec, width), reference, memoryview(out))
            outs.append((found, bytes(out[:length]) if found is not Codec.STORE else b""))
        finally:
            kernels.active = compiled
    assert outs[0] == outs[1]
    found, encoded = outs[0]
    if found is Codec.STORE:
        return
    for active in (compiled, None):
        kernels.active = active
        try:
            back = bytearray(len(view))
            decode_block(found, memoryview(encoded), memoryview(back), reference, "here")
        finally:
            kernels.active = compiled
        assert bytes(back) == bytes(view)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(KINDS), width=st.sampled_from(WIDTHS), hits=st.integers(1, 4))
def test_kernels_refuse_damage_as_numpy_does(seed, kind, width, hits):
    raw = numbers(seed, kind, 40_000)
    out = bytearray(len(raw))
    found, length = encode_block(memoryview(raw), Coding(Codec.PLANE, width), None, memoryview(out))
    if found is Codec.STORE:
        return
    rng = np.random.default_rng(seed)
    damaged = bytearray(out[:length])
    for at in rng.integers(0, min(length, 200), hits):
        damaged[at] = rng.integers(0, 256)
    told = []
    for active in (compiled, None):
        kernels.active = active
        back = bytearray(len(raw))
        try:
            decode_block(found, memoryview(damaged), memoryview(back), None, "here")
            told.append(bytes(back))
        except TierfsError as error:
            told.append(type(error))
        finally:
            kernels.active = compiled
    assert told[0] == told[1]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    width=st.sampled_from(WIDTHS),
    order=st.sampled_from(PlaneOrder),
    size=st.sampled_from([1, 2, 17, 510, 512]),
    has_base=st.booleans(),
)
def test_kernels_see_in_a_sample_what_numpy_sees(seed, kind, width, order, size, has_base):
    if width == 1:
        order = PlaneOrder.AS_IT_IS
    pairs, base = (
        np.frombuffer(numbers(number, kind, 2 * width * size), f"<u{width}").reshape(size, 2)
        for number in (seed, seed + 1)
    )
    seen = []
    for active in (compiled, None):
        kernels.active = active
        try:
            seen.append(counts_of_planes(pairs, order, base if has_base else None))
        finally:
            kernels.active = compiled
    assert seen[0] == seen[1]
    assert sum(found.most_count for found in seen[0]) > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("split", (bytes(8), None, 3, 0, 0, 255, bytearray(8))),
        ("split", (bytes(8), bytes(4), 2, 0, 0, 255, bytearray(8))),
        ("split", (bytes(8), None, 2, 0, 0, 255, bytearray(7))),
        ("split", (bytes(8), None, 2, 4, 0, 255, bytearray(8))),
        ("split", (bytes(8), None, 1, 0, 1, 255, bytearray(8))),
        ("split", (bytes(8), None, 2, 1, 1, 255, bytearray(8))),
        ("survey", (bytes(12), None, 3, 0)),
        ("survey", (bytes(12), None, 4, 0)),
        ("survey", (bytes(9), None, 4, 0)),
        ("survey", (bytes(8), None, 4, 4)),
        ("survey", (bytes(8), bytes(7), 4, 3)),
        ("survey", (bytes(4 * 2 * 513), None, 4, 0)),
        ("merge", (bytearray(8), None, 2, 1, 1, (bytes(8), b""))),
        ("merge", (bytearray(8), None, 2, 0, 0, (bytes(4), bytes(3)))),
        ("merge", (bytearray(8), None, 2, 0, 0, (bytes(4),))),
        ("merge", (bytearray(8), None, 2, 0, 1, (bytes(7), b""))),
        ("merge", (bytearray(8), bytes(7), 2, 0, 0, (bytes(4), bytes(4)))),
        ("pack_codes", (bytes(64), 0, 9, bytearray(32), bytearray(9), bytearray(32))),
        ("pack_codes", (bytes(64), 0, -1, bytearray(32), bytearray(9), bytearray(32))),
        ("unpack_codes", (bytes(4), 0, bytes(4), bytes(0), bytearray(8))),
        ("unpack_codes", (bytes(3), 0, bytes(0), bytes(0), bytearray(8))),
        ("unpack_codes", (bytes(4), 0, b"\x08\0\0\0", bytes(1), bytearray(8))),
        ("pack_mostly", (bytes(600), 0, 9, bytearray(10), bytearray(9))),
        ("unpack_mostly", (b"\x08", b"a", 0, bytearray(8))),
        ("unpack_mostly", (b"\xff", b"", 0, bytearray(300))),
        ("unpack_mostly", (b"\x01\x01", b"a", 0, bytearray(8))),
        ("unpack_mostly", (b"\x01", b"ab", 0, bytearray(8))),
        ("pack_seven", (bytes(128), bytearray(100))),
        ("unpack_seven", (bytes(100), bytearray(128))),
        ("copy", (1, 1, -1)),
        ("copy", (0, 1, 8)),
    ],
)
def test_kernels_check_every_length(name, arguments):
    with pytest.raises(ValueError):
        getattr(compiled, name)(*arguments)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 1000, 4096, 100_003])
@pytest.mark.parametrize("at", [0, 1, 31, 63])
def test_copy_moves_every_byte_and_no_other(length, at):
    source = np.random.default_rng(length).integers(0, 256, length + 130).astype(np.uint8)
    target = np.full(length + 130, 7, np.uint8)
    compiled.copy(target.ctypes.data + at, source.ctypes.data + 3, length)
    assert np.array_equal(target[at : at + length], source[3 : 3 + length])
    assert (np.delete(target, slice(at, at + length)) == 7).all()
