"""Which codec a block gets if the caller asks for a given one."""

from __future__ import annotations

import pytest
from support.coded import CONTENTS, WIDTHS, base_of, block, decode, encode

from tierfs.codec import Codec, Coding, encode_blocks
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import FormatError, InvalidInputError

SIZE = 1 << 18


@pytest.mark.parametrize("asked", list(Codec))
@pytest.mark.parametrize("width", WIDTHS)
def test_a_constant_block_is_one_element_whatever_was_asked_for(asked: Codec, width: int) -> None:
    raw = block("constant", SIZE + 5, width, 1)
    codec, encoded = encode(raw, Coding(asked, 4), bytes(len(raw) * asked.base_factor) or None)
    assert (codec, len(encoded)) == (Codec.CONST, width)


@pytest.mark.parametrize("at", [0, 70, SIZE // 2, SIZE - 1, SIZE + 4])
def test_one_other_byte_makes_a_block_no_constant(at: int) -> None:
    raw = bytearray(SIZE + 5)
    raw[at] = 1
    codec, encoded = encode(bytes(raw), Coding(Codec.PLANE, 4))
    assert codec is Codec.PLANE
    assert decode(codec, encoded, len(raw)) == raw


@pytest.mark.parametrize("asked", [codec for codec in Codec if codec not in {Codec.DPLANE, Codec.SPARSE}])
@pytest.mark.parametrize("width", WIDTHS)
def test_noise_is_stored_as_it_is(asked: Codec, width: int) -> None:
    raw = block("noise", SIZE, width, 2)
    codec, encoded = encode(raw, Coding(asked, width), bytes(len(raw) * asked.base_factor) or None)
    assert (codec, encoded) == (Codec.STORE, raw)


@pytest.mark.parametrize(("content", "width", "share"), [("floats", 4, 0.9), ("bfloat16", 2, 0.75)])
def test_floats_shrink_by_their_exponents(content: str, width: int, share: float) -> None:
    raw = block(content, BLOCK_BYTES, width, 3)
    codec, encoded = encode(raw, Coding(Codec.PLANE, width))
    assert codec is Codec.PLANE
    assert len(encoded) < share * len(raw)


def test_small_differences_shrink_more() -> None:
    raw = block("floats", SIZE, 4, 4)
    codec, encoded = encode(raw, Coding(Codec.DPLANE, 4), base_of(raw, "near", 4, 5))
    assert codec is Codec.DPLANE
    assert len(encoded) < 0.15 * len(raw)


def test_few_differences_are_sparse_and_many_are_not() -> None:
    raw = block("floats", SIZE, 4, 6)
    codec, encoded = encode(raw, Coding(Codec.SPARSE, 4), base_of(raw, "few", 4, 7))
    assert codec is Codec.SPARSE
    assert len(encoded) < 0.02 * len(raw)
    near = base_of(raw, "near", 4, 8)
    assert encode(raw, Coding(Codec.SPARSE, 4), near) == encode(raw, Coding(Codec.DPLANE, 4), near)
    assert encode(raw, Coding(Codec.SPARSE, 4), near)[0] is Codec.DPLANE


def test_a_block_unlike_its_base_becomes_planes() -> None:
    raw = block("bfloat16", BLOCK_BYTES, 2, 9)
    floats = b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, BLOCK_BYTES, 2))
    assert encode(raw, Coding(Codec.DERIVE), floats) == (Codec.DERIVE, b"\x01" + bytes(23))
    changed = bytearray(raw)
    changed[-2] ^= 1
    assert encode(bytes(changed), Coding(Codec.DERIVE), floats)[0] is Codec.DERIVE
    changed[: len(raw) // 3] = bytes(len(raw) // 3)
    assert encode(bytes(changed), Coding(Codec.DERIVE), floats) == encode(bytes(changed), Coding(Codec.PLANE, 2))
    assert encode(bytes(changed), Coding(Codec.DERIVE), floats)[0] is Codec.PLANE


def test_an_unrelated_base_does_not_change_a_derived_block() -> None:
    raw = block("bfloat16", BLOCK_BYTES, 2, 9)
    floats = bytearray(b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, BLOCK_BYTES, 2)))
    sound = bytes(floats)
    floats[4003] ^= 0x40
    floats[80_000:88_000] = bytes(8000)
    codec, encoded = encode(raw, Coding(Codec.DERIVE), bytes(floats))
    assert codec is Codec.DERIVE
    for base in (bytes(floats), sound):
        assert decode(codec, encoded, len(raw), base) == raw


def test_a_block_that_would_only_get_as_short_as_it_is_stays() -> None:
    raw = b"".join(number.to_bytes(8, "little") for number in range(7)) + b"7 bytes"
    # 2 bytes, 8 heads of 5 bytes, 7 planes of 1 byte, a plane of 7 and a tail of 7: 63 bytes for 63.
    assert encode(raw, Coding(Codec.PLANE, 8)) == (Codec.STORE, raw)


def test_text_is_compressed() -> None:
    raw = block("text", SIZE, 1, 1)
    codec, encoded = encode(raw, Coding(Codec.ZSTD))
    assert codec is Codec.ZSTD
    assert len(encoded) < 0.1 * len(raw)


@pytest.mark.parametrize("asked", [Codec.DPLANE, Codec.SPARSE, Codec.DERIVE])
def test_a_base_has_the_length_that_the_codec_needs(asked: Codec) -> None:
    raw = block("floats", 1000, 4, 1)
    for base in (None, bytes(999), bytes(1001), bytes(4000)):
        with pytest.raises(InvalidInputError):
            encode(raw, Coding(asked, 4), base)
        with pytest.raises(FormatError, match="base"):
            decode(asked, b"\x01", 1000, base)


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        encode(b"", Coding(Codec.STORE))
    with pytest.raises(InvalidInputError):
        encode(bytes(BLOCK_BYTES + 1), Coding(Codec.STORE))
    with pytest.raises(InvalidInputError, match="3 bytes"):
        encode(b"abc", Coding(Codec.PLANE, 3))
    raws, outs = [memoryview(b"different"), memoryview(b"eight by")], [memoryview(bytearray(9)) for _ in range(3)]
    with pytest.raises(InvalidInputError, match=r"PLANE cannot encode blocks of \[9, 8\] bytes"):
        encode_blocks(raws, Coding(Codec.PLANE, 4), None, outs[:2])
    many = Coding(Codec.PLANE, 4).together + 1
    with pytest.raises(InvalidInputError, match=r"PLANE cannot encode blocks of \[9, 9, .*\] bytes"):
        encode_blocks([raws[0]] * many, Coding(Codec.PLANE, 4), None, outs[:1] * many)
    with pytest.raises(InvalidInputError, match="SPARSE cannot encode blocks"):
        encode_blocks([raws[0]] * 2, Coding(Codec.SPARSE, 4), raws[0], outs[:2])
    with pytest.raises(InvalidInputError, match="cannot encode a block of 9 bytes into 8"):
        encode_blocks([raws[0]] * 2, Coding(Codec.PLANE, 4), None, [outs[0], outs[1][:8]])


@pytest.mark.parametrize("codec", [7, 8, 255])
def test_an_unknown_codec_asks_for_a_newer_version(codec: int) -> None:
    with pytest.raises(FormatError, match="here: unknown codec"):
        decode(codec, b"encoded", 100, bytes(100))


def test_planes_are_smaller_than_what_zstd_makes_of_floats() -> None:
    for content, width in (("floats", 4), ("floats", 8), ("bfloat16", 2)):
        raw = block(content, SIZE, width, 11)
        assert content in CONTENTS
        assert len(encode(raw, Coding(Codec.PLANE, width))[1]) < len(encode(raw, Coding(Codec.ZSTD))[1])
