"""Damaged blocks raise a clear error, and their counts cannot make a reader allocate too much memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coded import CONTENTS, base_of, block, codes, decode, encode, head, run_frame

from tierfs.codec import Codec, Coding
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import CorruptionError, FormatError

random_tests = settings(max_examples=500, derandomize=True, deadline=None, database=None)
# Upper bound for decoding any block: positions of 1 Mi elements, 8 bytes each, a few times over.
MEMORY_MAX = 48 << 20
SMALL_MEMORY_MAX = 3 << 20
HUGE = (1 << 32) - 1


@lru_cache(maxsize=1)
def sound() -> list[tuple[int, bytes, int, bytes]]:
    """Return codec, encoded bytes, size and base of valid blocks of every codec."""
    found = []
    for index, content in enumerate(CONTENTS):
        for width in (1, 2, 4, 8):
            raw = block(content, 2000 + 3 * index, width, index)
            for asked in (Codec.ZSTD, Codec.PLANE, Codec.DPLANE, Codec.SPARSE):
                base = base_of(raw, "few" if asked is Codec.SPARSE else "near", width, index)
                codec, encoded = encode(raw, Coding(asked, width), base if asked.base_factor else None)
                found.append((int(codec), encoded, len(raw), base))
    # Enough elements for the encoder to sample: these make CODES, SEVEN and WOVEN planes.
    for content, width in (("floats", 4), ("squares", 4), ("bfloat16", 2)):
        raw = block(content, 17_000 * width + 1, width, 1)
        for asked in (Codec.PLANE, Codec.DPLANE):
            base = base_of(raw, "near", width, 2)
            codec, encoded = encode(raw, Coding(asked, width), base)
            found.append((int(codec), encoded, len(raw), base))
    narrow = block("bfloat16", 2000, 2, 1)
    wide = b"".join(b"\0\0" + narrow[at : at + 2] for at in range(0, 2000, 2))
    base = wide[:400] + bytes(100) + wide[500:]
    found.append((int(Codec.DERIVE), encode(narrow, Coding(Codec.DERIVE), base)[1], 2000, base))
    assert {entry[0] for entry in found} == set(Codec)
    return found


def try_to_decode(codec: int, encoded: bytes, size: int, base: bytes, most: int) -> None:
    found: CorruptionError | FormatError | None = None
    tracemalloc.start()
    try:
        decode(codec, encoded, size, base)
    except (CorruptionError, FormatError) as error:
        found = error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found is None or (str(found).startswith("here: ") and found.path == "here")
    assert peak < most + 3 * size


@random_tests
@given(st.randoms(use_true_random=False), st.data())
def test_a_damaged_block_decodes_or_says_that_it_does_not(chance: random.Random, data: st.DataObject) -> None:
    codec, encoded, size, base = data.draw(st.sampled_from(sound()))
    damaged = bytearray(encoded)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(len(damaged), 60) if chance.random() < 0.5 else len(damaged)) if damaged else 0
        match chance.randrange(5):
            case 0:
                damaged[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                damaged[at : at + 4] = struct.pack("<I", chance.choice([0, 1, size, size + 1, 1 << 31, (1 << 32) - 1]))
            case 2:
                del damaged[at:]
            case 3:
                damaged[at:at] = chance.randbytes(chance.randint(1, 9))
            case _:
                del damaged[at : at + chance.randint(1, 9)]
    try_to_decode(codec, bytes(damaged), size, base, SMALL_MEMORY_MAX)


@random_tests
@given(st.integers(0, 8), st.binary(max_size=200), st.sampled_from([1, 2, 5, 16, 201, 1000]))
def test_any_bytes_decode_or_say_that_they_do_not(codec: int, encoded: bytes, size: int) -> None:
    try_to_decode(codec, encoded, size, bytes(size * (2 if codec == Codec.DERIVE else 1)), SMALL_MEMORY_MAX)


@random_tests
@given(
    st.sampled_from([3, 4, 5]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 2, 7, 8, 9]), st.integers(0, 70),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=9, max_size=9), st.binary(max_size=300),
)  # fmt: skip
def test_heads_of_any_content_decode_or_say_that_they_do_not(
    codec: int, width: int, flags: int, count: int, heads: list[tuple[int, int]], rest: bytes
) -> None:
    start = bytes([width, flags]) if codec != Codec.SPARSE else struct.pack("<BBII", width, flags & 1, count, count)
    planes = heads[: width + (codec == Codec.SPARSE)]
    body = (rest + bytes(200))[: sum(length for _, length in planes)]
    encoded = start + b"".join(head(*plane) for plane in planes) + body
    for size in (64, 160, 1000):
        try_to_decode(codec, encoded, size, bytes(size), SMALL_MEMORY_MAX)


def frame_of(claim: int, window: int = 0) -> bytes:
    """Return the start of a zstd frame that claims `claim` bytes, with a window of that size or of 2^``window``."""
    if window:
        return b"\x28\xb5\x2f\xfd\xc0" + bytes([window - 10 << 3]) + struct.pack("<Q", claim) + bytes(20)
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", claim) + bytes(20)


@pytest.mark.parametrize(
    ("codec", "encoded"),
    [
        (1, frame_of(1 << 40)),
        (1, frame_of(1 << 40, 31)),
        (1, frame_of(BLOCK_BYTES, 31)),
        (1, frame_of(BLOCK_BYTES, 27)),
        (3, b"\x01\x00" + head(2, 33) + frame_of(1 << 40)),
        (3, b"\x08\x00" + head(2, 0xFFFFFFFF) * 8),
        (3, b"\x01\x00" + head(3, 38) + codes(0, {}, frame_of(1 << 40))),
        (3, b"\x01\x00" + head(3, 38) + struct.pack("<BI", 0, HUGE) + frame_of(BLOCK_BYTES // 2)),
        (3, b"\x01\x00" + head(3, 38) + struct.pack("<BI", 0, 6) + bytes(33)),
        (3, b"\x01\x00" + head(4, BLOCK_BYTES // 8 * 7)),
        (3, b"\x08\x00" + (head(5, HUGE) + head(5, 0)) * 4),
        (3, b"\x01\x00" + head(6, 40) + struct.pack("<BII", 0, HUGE, HUGE) + bytes(31)),
        (3, b"\x01\x00" + head(6, 40) + struct.pack("<BII", 0, 0, 31) + b"\xff" * 31),
        (3, b"\x01\x00" + head(6, 40) + struct.pack("<BII", 0, 1, 30) + b"\xff" * 29 + bytes(2)),
        (3, b"\x08\x01" + head(1, 1) * 8 + bytes(8)),
        (4, b"\x08\x00" + head(1, 1) * 8 + bytes(8)),
        (5, struct.pack("<BBII", 1, 0, HUGE, HUGE) + head(1, 1) * 2 + bytes(2)),
        (5, struct.pack("<BBII", 1, 0, HUGE, HUGE) + head(2, 33) + head(1, 1) + frame_of(HUGE) + b"\0"),
        (5, struct.pack("<BBII", 1, 0, 1, HUGE) + head(2, 33) + head(1, 1) + frame_of(HUGE) + b"\0"),
        (5, struct.pack("<BBII", 1, 0, BLOCK_BYTES, BLOCK_BYTES) + head(1, 1) * 2 + bytes(2)),
        (5, struct.pack("<BBII", 1, 0, BLOCK_BYTES, BLOCK_BYTES + BLOCK_BYTES // 255) + head(1, 1) * 2 + bytes(2)),
        (5, struct.pack("<BBII", 1, 0, 0, BLOCK_BYTES // 255) + head(1, 1) + head(0, 0) + b"\xff"),
    ],
)
def test_a_few_bytes_that_promise_much_take_no_more_than_a_block(codec: int, encoded: bytes) -> None:
    try_to_decode(codec, encoded, BLOCK_BYTES, bytes(BLOCK_BYTES), MEMORY_MAX)


def test_a_frame_that_holds_more_than_it_states_is_refused() -> None:
    frame = bytearray(run_frame(40, 7))
    frame[5] = 39
    with pytest.raises(CorruptionError):
        decode(1, bytes(frame), 39)
