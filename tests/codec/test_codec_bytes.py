"""The bytes of each codec are those of FORMAT.md, "Codecs". They were written by hand from its tables."""

from __future__ import annotations

import struct

import pytest
from support.coded import codes, decode, encode, head, run_frame, stored_frame

from tierfs.codec import Codec, Coding
from tierfs.errors import CorruptionError

HUGE = (1 << 32) - 1
COUNTING = struct.pack("<16I", *range(16))
# The sign bit moves last, and is 0 everywhere: three planes of zeros and one that is stored raw.
PLANE = b"\x04\x01" + head(1, 1) * 3 + head(0, 16) + b"\0\0\0" + bytes(range(16))
# Every other element has the sign bit set, which becomes the highest bit of the second plane.
SIGNED = struct.pack("<16I", *(index | (index % 2) << 31 for index in range(16)))
SIGNED_PLANE = b"\x04\x01" + (head(1, 1) + head(0, 16)) * 2 + b"\0" + b"\0\x80" * 8 + b"\0" + bytes(range(16))
SHORTS = struct.pack("<40H", *(index | (index % 2) << 15 for index in range(40)))
SHORTS_PLANE = b"\x02\x01" + head(1, 1) + head(0, 40) + b"\0" + bytes(i | i % 2 << 7 for i in range(40))

# Differences of -10 to 9 from a base of 1000, 1001 ...: zigzag makes them 19, 17 ... 1, 0, 2 ... 18.
DIFFERENT = struct.pack("<20H", *(1000 + 2 * index - 10 for index in range(20))) + b"T"
DIFFERENT_BASE = struct.pack("<20H", *(1000 + index for index in range(20))) + b"B"
DPLANE = b"\x02\x00" + head(1, 1) + head(0, 20) + b"\0" + bytes([*range(19, 0, -2), *range(0, 20, 2)]) + b"T"

SPARSE_BASE = bytes(1201)
# Element 3 is greater by one, element 300 smaller by two: gaps of 3 and of 296 = 255 + 41; zigzag makes them 2 and 3.
FEW = bytes(6) + b"\x01\x00" + bytes(592) + b"\xfe\xff" + bytes(598) + b"T"
SPARSE = (
    b"\x02\x00" + struct.pack("<II", 2, 3) + head(0, 3) + head(1, 1) + head(0, 2) + b"\x03\xff\x29" + b"\0" + b"\2\3T"
)

# float32: a tie to even, down and up; just over a tie; the greatest number, which rounds to infinity; -infinity; -0;
# two denormals; two NaNs; 1.
FLOATS = struct.pack(
    "<11I", 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x80000000, 0x00000001, 0x80018000, 0x7F800001,
    0xFFFFFFFF, 0x3F800000,
)  # fmt: skip
ROUNDED = struct.pack(
    "<11H", 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x8002, 0x7FFF, 0x7FFF, 0x3F80
)  # fmt: skip
ALL_FOLLOW = b"\x01" + bytes(8) + head(0, 0) * 3
# In nine copies, elements 5 (-0) and 11 (1) do not follow from the base: gaps of 5 and 5, then their own values.
OTHERS = FLOATS[:20] + bytes(4) + FLOATS[24:] + b"some" + FLOATS[4:] + FLOATS * 7 + b"??"
TWO_DO_NOT_FOLLOW = (
    b"\x01" + struct.pack("<II", 2, 2) + head(1, 1) + head(0, 2) * 2 + b"\x05" + b"\x80\x3f" + b"\x00\x80T"
)

STORED_FRAME = stored_frame(bytes(40))  # longer than its content

# The first and the last byte of a window that begins at 250, in turn, except the third byte and the 61st.
CODED = b"\xfa\x09\x77" + b"\x09\xfa" * 28 + b"\x09\x0a"
PAIRS, OUTSIDE = run_frame(31, 0xF0), {2: 0x77, 60: 0x0A}
CODED_PLANE = b"\x01\x00" + head(3, 5 + 10 + 10) + codes(250, OUTSIDE, PAIRS)

# 64 bytes of seven bits are packed into 56, and six more stay as they are. The last eight of the 64 are 1, 2, 4 ... 64
# and 127: byte k has only bit k, and the last one has all seven.
SEVENS = bytes(range(56)) + bytes([1, 2, 4, 8, 16, 32, 64, 127]) + b"behind"
SEVENS_PLANE = (
    b"\x01\x00"
    + head(4, 56 + 6)
    + bytes((8 * k + j) | (j in {k, 7}) << 7 for k in range(7) for j in range(8))
    + b"behind"
)

# All bytes are 7 except the third and the 600th: gaps of 2 and of 596 = 2 * 255 + 86.
MOSTLY = b"\7\7\x09" + b"\7" * 596 + b"\x0a\7"
MOSTLY_PLANE = b"\x01\x00" + head(6, 9 + 4 + 2) + struct.pack("<BII4B", 7, 2, 4, 2, 255, 255, 86) + b"\x09\x0a"

# The upper half is 0xa219: a sign, 0x44 in the next eight bits, 0x19 in the last seven. The lower half stays as it is.
WOVEN = struct.pack("<20I", *(0xA219_0000 | 0x1234 + index for index in range(20)))
WOVEN_PLANE = (
    b"\x04\x01" + head(1, 1) * 2 + head(5, 40) + head(5, 0) + b"\x44\x99" + struct.pack("<20H", *range(0x1234, 0x1248))
)
WOVEN_ABOVE = (
    b"\x04\x00" + head(5, 40) + head(5, 0) + head(1, 1) * 2 + struct.pack("<20H", *range(0x1234, 0x1248)) + b"\x44\x33"
)
ABOVE = struct.pack("<20I", *(n << 16 | 0x4433 for n in range(0x1234, 0x1248)))
# In elements of 8 bytes, the sign moves to bit 7 of the upper 16 bits.
EIGHT = struct.pack("<20Q", *[0x8000_0000_0000_0000] * 19, 0x0080_0000_0000_0000)
EIGHT_PLANE = b"\x08\x01" + head(0, 20) * 2 + head(1, 1) * 6 + bytes(19) + b"\1" + b"\x80" * 19 + bytes(7)

# The upper halves of the differences are 1 and -1, after zigzag 2 and 1. The lower halves stay as they are.
HALVES_BASE = b"\xff\xff\0\0" * 40
HALVES = struct.pack("<40I", *((0xFFFF + ((0xFFFF if n % 2 else 1) << 16 | n)) % (1 << 32) for n in range(40)))
HALVES_PLANE = (
    b"\x04\x02"
    + head(1, 1)
    + head(0, 40)
    + head(5, 80)
    + head(5, 0)
    + b"\0"
    + b"\2\1" * 20
    + struct.pack("<40H", *range(40))
)


@pytest.mark.parametrize(
    ("coding", "raw", "base", "codec", "encoded"),
    [
        (Coding(Codec.STORE), b"noise", None, 0, b"noise"),
        (Coding(Codec.STORE), b"\x07" * 9, None, 2, b"\x07"),
        (Coding(Codec.PLANE, 4), b"ab" * 4 + b"a", None, 2, b"ab"),
        (Coding(Codec.ZSTD), b"abcd" * 3, None, 2, b"abcd"),
        (Coding(Codec.CONST), b"12345678" * 9 + b"123", None, 2, b"12345678"),
        (Coding(Codec.PLANE, 4), COUNTING, None, 3, PLANE),
        (Coding(Codec.PLANE, 4), COUNTING + b"xyz", None, 3, PLANE + b"xyz"),
        (Coding(Codec.PLANE, 4), SIGNED, None, 3, SIGNED_PLANE),
        (Coding(Codec.PLANE, 2), SHORTS, None, 3, SHORTS_PLANE),
        (Coding(Codec.DPLANE, 2), DIFFERENT, DIFFERENT_BASE, 4, DPLANE),
        (Coding(Codec.SPARSE, 2), FEW, SPARSE_BASE, 5, SPARSE),
        (Coding(Codec.DERIVE), ROUNDED * 3, FLOATS * 3, 6, ALL_FOLLOW),
        (Coding(Codec.DERIVE), ROUNDED * 3 + b"T", FLOATS * 3 + b"??", 6, ALL_FOLLOW + b"T"),
        (Coding(Codec.DERIVE), ROUNDED * 9 + b"T", OTHERS, 6, TWO_DO_NOT_FOLLOW),
    ],
)
def test_a_block_is_written_and_read_byte_by_byte(
    coding: Coding, raw: bytes, base: bytes | None, codec: int, encoded: bytes
) -> None:
    assert encode(raw, coding, base) == (codec, encoded)
    assert decode(codec, encoded, len(raw), base) == raw


@pytest.mark.parametrize(
    ("codec", "raw", "base", "encoded"),
    [
        (1, b"\x07" * 40, None, run_frame(40, 7)),
        (1, b"\x07" * 400, None, run_frame(400, 7)),
        # Elements of one byte, whose bits are in order 0.
        (3, b"\x07" * 40, None, b"\x01\x00" + head(2, 10) + run_frame(40, 7)),
        (3, CODED, None, CODED_PLANE),
        # If a position is named twice, the last byte counts.
        (3, CODED[:60] + b"\x05", None,
         b"\x01\x00" + head(3, 30) + struct.pack("<BI3I", 250, 3, 60, 2, 60) + b"\x0a\x77\x05" + PAIRS),
        (3, SEVENS, None, SEVENS_PLANE),
        (3, MOSTLY, None, MOSTLY_PLANE),
        (3, b"\7" * 60, None, b"\x01\x00" + head(6, 9) + struct.pack("<BII", 7, 0, 0)),
        (3, WOVEN, None, WOVEN_PLANE),
        (3, WOVEN + b"xyz", None, WOVEN_PLANE + b"xyz"),
        (3, ABOVE, None, WOVEN_ABOVE),
        (3, struct.pack("<20I", *(n | 0x20000 for n in range(20))), None,
         b"\x04\x00" + head(1, 1) * 2 + head(5, 40) + head(5, 0) + b"\0\2" + struct.pack("<20H", *range(20))),
        (3, EIGHT, None, EIGHT_PLANE),
        # 0x8001: the first plane holds the eight bits behind the sign, the second one the sign and the last seven bits.
        (3, b"\x01\x80" * 40, None, b"\x02\x01" + head(2, 10) + head(1, 1) + run_frame(40, 0) + b"\x81"),
        # A window of exponents that begins at 250 wraps around without reaching the sign.
        (3, b"\x80\x7f" * 59 + b"\x80\x01", None, b"\x02\x01" + head(3, 5 + 39) + head(1, 1)
         + codes(250, {}, stored_frame(b"\x55" * 29 + b"\x95")) + b"\0"),
        (3, b"\x01\x80" * 40, None, b"\x02\x00" + head(2, 10) + head(1, 1) + run_frame(40, 0x80) + b"\x01"),
        # Every element is 0x80..00 more than its base, so the difference is the most negative one.
        (4, (bytes(7) + b"\x80") * 20, bytes(160), b"\x08\x00" + head(2, 10) + head(1, 1) * 7
         + run_frame(20, 255) + b"\xff" * 7),
        (4, HALVES, HALVES_BASE, HALVES_PLANE),
        (4, HALVES + b"T", HALVES_BASE + b"B", HALVES_PLANE + b"T"),
        # Only the tail differs.
        (5, b"base" * 10 + b"t", b"base" * 10 + b"b", b"\x02\x00" + bytes(8) + head(0, 0) * 3 + b"t"),
        # Every element differs.
        (5, b"\x05" * 60, b"\x04" * 60, b"\x01\x00" + struct.pack("<II", 60, 60) + head(2, 10) + head(1, 1)
         + run_frame(60, 0) + b"\x02"),
    ],
)  # fmt: skip
def test_forms_that_no_writer_uses_are_read(codec: int, raw: bytes, base: bytes | None, encoded: bytes) -> None:
    assert decode(codec, encoded, len(raw), base) == raw


@pytest.mark.parametrize(
    ("codec", "size", "encoded"),
    [
        (0, 5, b"four"),
        (1, 40, b""),
        (1, 39, run_frame(40, 7)),
        (1, 41, run_frame(40, 7)),
        (1, 40, run_frame(40, 7) + b"\0"),
        (1, 40, run_frame(40, 7)[:-1]),
        (1, 40, run_frame(40, 7) * 2),
        (1, 40, b"\x50\x2a\x4d\x18\0\0\0\0" + run_frame(40, 7)),
        (1, 10, run_frame(10, 7)),
        (2, 9, b"abc"),
        (2, 9, b""),
        (2, 8, b"12345678"),
        (3, 64, b"\x04"),
        (3, 64, PLANE[:20]),
        (3, 64, PLANE[:-1]),
        (3, 64, PLANE + b"\0"),
        (3, 63, PLANE),
        (3, 65, PLANE),
        (3, 64, b"\x03" + PLANE[1:]),
        (3, 64, b"\x00" + PLANE[1:]),
        (3, 64, b"\x04\x09" + PLANE[2:]),
        (3, 64, b"\x04\x02" + PLANE[2:]),
        (3, 61, b"\x01\x01" + CODED_PLANE[2:]),
        (3, 61, b"\x01\x00" + head(3, 25) + codes(250, {2: 1, 61: 1}, PAIRS)),
        (3, 61, b"\x01\x00" + head(3, 25) + codes(250, {2: 1, HUGE: 1}, PAIRS)),
        (3, 61, b"\x01\x00" + head(3, 25) + codes(250, OUTSIDE, run_frame(30, 0xF0))),
        (3, 61, b"\x01\x00" + head(3, 25) + codes(250, OUTSIDE, run_frame(32, 0xF0))),
        (3, 61, b"\x01\x00" + head(3, 26) + codes(250, OUTSIDE, PAIRS) + b"x"),
        (3, 61, b"\x01\x00" + head(3, 25) + struct.pack("<BI", 250, 3) + codes(250, OUTSIDE, PAIRS)[5:]),
        (3, 61, b"\x01\x00" + head(3, 25) + struct.pack("<BI", 250, 1) + codes(250, OUTSIDE, PAIRS)[5:]),
        (3, 61, b"\x01\x00" + head(3, 50) + struct.pack("<BI", 250, 9) + bytes(45)),
        # The data of the codes are as long as the plane.
        (3, 80, b"\x04\x00" + head(1, 1) * 3 + head(3, 20) + bytes(3) + codes(0, {}, run_frame(10, 0)) + bytes(5)),
        (3, 80, b"\x04\x00" + head(1, 1) * 3 + head(3, 20) + bytes(3) + codes(0, {1: 0}, run_frame(10, 0))),
        (3, 61, b"\x01\x00" + head(3, 50) + struct.pack("<BI", 250, HUGE) + bytes(45)),
        (3, 61, b"\x01\x00" + head(3, 5) + struct.pack("<BI", 250, 0)),
        (3, 61, b"\x01\x00" + head(3, 0)),
        (3, 64, b"\x01\x00" + head(4, 55) + bytes(55)),
        (3, 128, b"\x01\x00" + head(4, 113) + bytes(113)),
        # MOSTLY: one byte more than gaps; one less; a gap more; a gap less; gaps that end beyond the plane or are not
        # closed; data too short or too long for the counts.
        (3, 601, MOSTLY_PLANE[:8] + struct.pack("<II", 3, 4) + MOSTLY_PLANE[16:]),
        (3, 601, MOSTLY_PLANE[:8] + struct.pack("<II", 1, 4) + MOSTLY_PLANE[16:]),
        (3, 601, MOSTLY_PLANE[:8] + struct.pack("<II", 3, 3) + MOSTLY_PLANE[16:]),
        (3, 601, MOSTLY_PLANE[:8] + struct.pack("<II", 1, 5) + MOSTLY_PLANE[16:]),
        (3, 601, MOSTLY_PLANE[:8] + struct.pack("<II", 2, HUGE) + MOSTLY_PLANE[16:]),
        (3, 601, MOSTLY_PLANE[:19] + b"\x58" + MOSTLY_PLANE[20:]),
        (3, 601, MOSTLY_PLANE[:19] + b"\xff" + MOSTLY_PLANE[20:]),
        (3, 599, MOSTLY_PLANE),
        (3, 60, b"\x01\x00" + head(6, 8) + bytes(8)),
        (3, 60, b"\x01\x00" + head(6, 10) + bytes(10)),
        # SEVEN needs at least 64 bytes.
        (3, 80, b"\x04\x00" + head(1, 1) * 3 + head(4, 20) + bytes(3) + bytes(20)),
        (3, 80, WOVEN_PLANE[:12] + head(5, 39) + head(5, 1) + WOVEN_PLANE[22:]),
        (3, 80, WOVEN_PLANE[:12] + head(5, 40) + head(0, 0) + WOVEN_PLANE[22:]),
        (3, 80, WOVEN_PLANE[:12] + head(5, 40) + head(5, 1) + WOVEN_PLANE[22:] + b"x"),
        (3, 80, WOVEN_PLANE[:12] + head(5, 39) + head(5, 0) + WOVEN_PLANE[23:]),
        (3, 80, WOVEN_PLANE[:12] + head(5, 41) + head(5, 0) + WOVEN_PLANE[22:] + b"x"),
        (3, 80, WOVEN_PLANE[:12] + head(0, 20) + head(5, 20) + WOVEN_PLANE[22:]),
        (3, 80, b"\x04\x01" + WOVEN_ABOVE[2:]),
        (3, 80, b"\x04\x00" + head(1, 1) + head(5, 40) + head(5, 0) + head(1, 1) + bytes(42)),
        (3, 80, b"\x01\x00" + head(5, 70) + bytes(70)),
        (
            5,
            1201,
            b"\x02\x00" + struct.pack("<II", 2, 3) + head(5, 6) + head(1, 1) + head(0, 2) + bytes(3) + SPARSE[25:],
        ),
        (3, 64, b"\x04\x01\x07" + PLANE[3:]),
        (3, 64, b"\x04\x01" + head(1, 2) + PLANE[7:22] + b"\0" + PLANE[22:]),
        (3, 64, b"\x04\x01" + head(1, 0) + PLANE[7:22] + PLANE[23:]),
        (3, 64, b"\x04\x01" + head(1, 1) * 3 + head(0, 17) + bytes(20)),
        (3, 64, b"\x04\x01" + head(1, 1) * 3 + head(0, 15) + bytes(18)),
        (3, 80, b"\x02\x00" + head(1, 1) + head(2, 49) + b"\0" + STORED_FRAME),
        (3, 40, b"\x01\x00" + head(2, 10) + run_frame(41, 7)),
        (3, 40, b"\x01\x00" + head(2, 11) + run_frame(40, 7) + b"\0"),
        (3, 40, b"\x01\x00" + head(2, 0)),
        (3, 40, b"\x01\x00" + head(2, 0xFFFFFFFF)),
        (4, 41, b"\x02\x01" + DPLANE[2:]),
        (4, 80, b"\x04\x02" + WOVEN_ABOVE[2:]),
        (4, 61, b"\x01\x02" + CODED_PLANE[2:]),
        (5, 1201, SPARSE[:9]),
        (5, 1201, SPARSE[:1] + b"\x01" + SPARSE[2:]),
        (5, 1201, b"\x03" + SPARSE[1:]),
        # SPARSE: more differences than gaps, fewer, gaps that are not closed or end beyond the block, wrong counts.
        (5, 1201, b"\x02\x00" + struct.pack("<II", 3, 3) + head(0, 3) + head(1, 1) * 2 + b"\x03\xff\x29\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 2, 3) + head(0, 3) + head(1, 1) * 2 + b"\x03\x29\xff\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 1, 3) + head(0, 3) + head(1, 1) * 2 + b"\x03\xff\x29\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 1, 4) + head(0, 4) + head(1, 1) * 2 + b"\xff\xff\xff\x00\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 1, 3) + head(0, 3) + head(1, 1) * 2 + b"\xff\xff\x5a\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 601, 601) + head(1, 1) * 3 + b"\0\0\0T"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 0, 1) + head(1, 1) + head(0, 0) * 2 + b"\xffT"),
        (5, 1201, b"\x02\x00" + struct.pack("<II", 0, 0) + head(1, 1) + head(0, 0) * 2 + b"\xffT"),
        (6, 22, b"\x00"),
        (6, 22, b"\x02"),
        (6, 22, b"\x01T"),
        (6, 23, b"\x01"),
    ],
)
def test_encoded_blocks_that_break_a_rule_are_refused(codec: int, size: int, encoded: bytes) -> None:
    base = bytes(size * Codec(codec).base_factor)
    with pytest.raises(CorruptionError, match="here: "):
        decode(codec, encoded, size, base)
