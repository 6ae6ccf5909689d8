"""Encode and decode one block. Each codec has a module of its own.

FORMAT.md, "Codecs". Pure functions over buffers of any length and alignment. Every size is bounded before memory is
allocated. Modules that need numpy are imported on their first use, since importing this package must not import numpy.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from tierfs.codec import frames
from tierfs.codec.frames import DamageError
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import CorruptionError, FormatError, InvalidInputError

PROBE_BYTES = 16 * 1024
# zstd must shrink a block to this share, or it is not worth the time. Plain zstd saves 8 % of dense floats, at a tenth
# of a disk's speed, and far more of text, indices and zeros.
WORTH = 0.75


class Codec(enum.IntEnum):
    """How one block is encoded. The number is stored in the envelope."""

    STORE = 0
    ZSTD = 1
    CONST = 2
    PLANE = 3
    DPLANE = 4
    SPARSE = 5
    DERIVE = 6

    @property
    def base_factor(self) -> int:
        """Bytes of base that the codec needs for each byte of a block."""
        return _BASE_FACTORS.get(self, 0)

    @property
    def codings(self) -> tuple[Coding, ...]:
        """Every way to request the codec, with the usual element widths first."""
        return tuple(Coding(self, width) for width in _WIDTHS.get(self, (1,)))


# The survey of several blocks takes a fifth of the time to encode one. With more blocks, the caches no longer hold
# them.
_TOGETHER = 4
_OF_PLANES = frozenset({Codec.PLANE, Codec.DPLANE})
_WIDTHS = dict.fromkeys((Codec.PLANE, Codec.DPLANE, Codec.SPARSE), (2, 4, 1, 8))
_BASE_FACTORS = {Codec.DPLANE: 1, Codec.SPARSE: 1, Codec.DERIVE: 2}
_KNOWN = frozenset(Codec)


class Reason(enum.IntEnum):
    """Why a block has its codec. The number is stored in the envelope, for people to read."""

    NOT_STATED = 0
    DELTA = 1
    DELTA_TOO_LARGE = 2
    NO_BASE = 3
    LINK_IS_FASTER = 4
    DERIVED = 5


class Coding(NamedTuple):
    """How a block should be encoded. `encode_block` follows it where it pays.

    Attributes:
        codec: CONST requests nothing, since `encode_block` finds constant blocks by itself.
        width: Bytes of an element, 1, 2, 4 or 8, for PLANE, DPLANE and SPARSE.
    """

    codec: Codec
    width: int = 1

    @property
    def together(self) -> int:
        """How many blocks `encode_blocks` best encodes at once; it accepts no more."""
        return _TOGETHER if self.codec in _OF_PLANES else 1


def encode_block(raw: memoryview, coding: Coding, base: memoryview | None, out: memoryview) -> tuple[Codec, int]:
    """Encode one block.

    A block that repeats one element becomes CONST, whatever the coding. SPARSE becomes DPLANE if too many elements
    differ. DERIVE becomes PLANE if the block does not follow from its base. Every codec becomes STORE if it does not
    pay.

    Args:
        raw: The block, 1 byte to 1 MiB. Borrowed, as are the others.
        base: The block's base: as long as ``raw`` for DPLANE and SPARSE, twice as long for DERIVE.
        out: At least as long as ``raw``, and not overlapping it. Undefined behind the encoded bytes.

    Returns:
        The codec, and the number of encoded bytes in ``out``, fewer than in ``raw``. For STORE it is the length of
        ``raw``, whose bytes are the encoded ones, and ``out`` is undefined.

    Raises:
        InvalidInputError: A length or the width is invalid, or the codec needs a base that is not given.
    """
    (found,) = encode_blocks([raw], coding, [base], [out])
    return found


def encode_blocks(
    raws: Sequence[memoryview], coding: Coding, bases: Sequence[memoryview | None], outs: Sequence[memoryview]
) -> list[tuple[Codec, int]]:
    """Encode blocks of one length, each as `encode_block` does, but faster: a call of numpy costs as much as its work.

    At most `Coding.together` blocks. They share one survey, so unlike blocks, for example of different tensors, may
    come out larger than alone.

    Raises:
        InvalidInputError: As in `encode_block`; also if the blocks differ in length, or are too many.
    """
    from tierfs.codec.numbers import lent  # noqa: PLC0415 - see the module's description

    if len(raws) > coding.together or len({len(raw) for raw in raws}) != 1:
        raise InvalidInputError(
            f"{coding.codec.name} cannot encode blocks of {[len(raw) for raw in raws]} bytes together"
        )
    for raw, out in zip(raws, outs, strict=True):
        _check(raw, coding, out)
    with lent():
        return _encode_together(raws, coding, bases, outs)


def decode_block(codec: int, encoded: memoryview, out: memoryview, base: memoryview | None, where: str) -> None:
    """Decode one block. Does not verify its digest.

    Args:
        codec: As in the block table.
        encoded: The encoded bytes. Borrowed, as are the others.
        out: Exactly as long as the block's raw bytes. Every byte is written. After an error its content is undefined.
        base: The block's base, if its chunk has one: as long as ``out`` for DPLANE and SPARSE, twice as long for
            DERIVE, and not overlapping it. Other codecs ignore it.
        where: The block's place, for messages.

    Raises:
        CorruptionError: The bytes do not decode to this size.
        FormatError: The codec is unknown, or needs a base of another length.
    """
    try:
        _decode(codec, encoded, out, base, where)
    except DamageError as error:
        raise CorruptionError(f"{where}: a block does not decode: {error}", path=where) from None


def _check(raw: memoryview, coding: Coding, out: memoryview) -> None:
    if coding.width not in (1, 2, 4, 8):
        raise InvalidInputError(f"unsupported element width: {coding.width} bytes")
    if not 0 < len(raw) <= min(BLOCK_BYTES, len(out)):
        raise InvalidInputError(f"cannot encode a block of {len(raw)} bytes into {len(out)}")


def _encode_together(
    raws: Sequence[memoryview], coding: Coding, bases: Sequence[memoryview | None], outs: Sequence[memoryview]
) -> list[tuple[Codec, int]]:
    from tierfs.codec import delta, numbers, planes  # noqa: PLC0415

    if len(raws) == 1 or any(numbers.constant_element(raw) for raw in raws):
        return [_encode_alone(raw, coding, base, out) for raw, base, out in zip(raws, bases, outs, strict=True)]
    if coding.codec is Codec.DPLANE:
        references = [_reference(coding.codec, raw, base) for raw, base in zip(raws, bases, strict=True)]
        lengths = delta.encode_differences(raws, coding.width, references, outs)
    else:
        lengths = planes.encode_planes(raws, coding.width, outs)
    return [
        (Codec.STORE, len(raw)) if length is None else (coding.codec, length)
        for raw, length in zip(raws, lengths, strict=True)
    ]


def _encode_alone(raw: memoryview, coding: Coding, base: memoryview | None, out: memoryview) -> tuple[Codec, int]:
    from tierfs.codec import numbers  # noqa: PLC0415

    element = numbers.constant_element(raw)
    if element is not None:
        out[: len(element)] = element
        return Codec.CONST, len(element)
    codec, length = _encode(raw, coding, base, out)
    return (codec, length) if length is not None else (Codec.STORE, len(raw))


def _encode(raw: memoryview, coding: Coding, base: memoryview | None, out: memoryview) -> tuple[Codec, int | None]:
    from tierfs.codec import delta, planes  # noqa: PLC0415

    codec, width = coding
    reference = _reference(codec, raw, base)
    if codec is Codec.ZSTD:
        return codec, _encode_zstd(raw, out)
    if codec is Codec.DERIVE:
        length = delta.encode_derived(raw, reference, out)
        if length is not None:
            return codec, length
        codec, width = Codec.PLANE, 2
    if codec is Codec.SPARSE:
        length = delta.encode_sparse(raw, width, reference, out)
        if length is not None:
            return codec, length
        codec = Codec.DPLANE
    if codec is Codec.DPLANE:
        (length,) = delta.encode_differences([raw], width, [reference], [out])
        return codec, length
    if codec is Codec.PLANE:
        (length,) = planes.encode_planes([raw], width, [out])
        return codec, length
    return Codec.STORE, None


def _reference(codec: Codec, raw: memoryview, base: memoryview | None) -> memoryview:
    reference = memoryview(b"") if base is None else base
    if codec.base_factor and len(reference) != codec.base_factor * len(raw):
        raise InvalidInputError(f"{codec.name} cannot encode {len(raw)} bytes against a base of {len(reference)}")
    return reference


def _encode_zstd(raw: memoryview, out: memoryview) -> int | None:
    middle = max(0, (len(raw) - PROBE_BYTES) // 2)
    probe = raw[middle : middle + PROBE_BYTES]
    if len(frames.compress(probe)) > len(probe) * WORTH:
        return None
    frame = frames.compress(raw)
    if len(frame) > len(raw) * WORTH:
        return None
    out[: len(frame)] = frame
    return len(frame)


def _decode(codec: int, encoded: memoryview, out: memoryview, base: memoryview | None, where: str) -> None:
    if codec == Codec.STORE:
        if len(encoded) != len(out):
            raise DamageError(f"{len(encoded)} bytes instead of {len(out)}")
        out[:] = encoded
        return
    if codec not in _KNOWN:
        raise FormatError(f"{where}: unknown codec {codec}: use a newer tierfs", path=where)
    if not 0 < len(encoded) < len(out):
        raise DamageError(f"{len(encoded)} encoded bytes for a block of {len(out)}")
    if codec == Codec.ZSTD:
        out[:] = frames.decompress(encoded, len(out))
        return
    from tierfs.codec.numbers import lent  # noqa: PLC0415

    factor = Codec(codec).base_factor
    reference = memoryview(b"") if base is None else base
    if factor and len(reference) != factor * len(out):
        raise FormatError(
            f"{where}: codec {codec} with a base of {len(reference)} bytes for a block of {len(out)}", path=where
        )
    # Import only the module that is needed: importing all of them takes 20 us a block while the caches are cold.
    with lent():
        if codec == Codec.PLANE:
            from tierfs.codec.planes import decode_plane  # noqa: PLC0415

            decode_plane(encoded, out)
        elif codec == Codec.DPLANE:
            from tierfs.codec.delta import decode_difference  # noqa: PLC0415

            decode_difference(encoded, out, reference)
        elif codec == Codec.CONST:
            from tierfs.codec.numbers import decode_constant  # noqa: PLC0415

            decode_constant(encoded, out)
        elif codec == Codec.SPARSE:
            from tierfs.codec.delta import decode_sparse  # noqa: PLC0415

            decode_sparse(encoded, out, reference)
        else:
            from tierfs.codec.delta import decode_derived  # noqa: PLC0415

            decode_derived(encoded, out, reference)
