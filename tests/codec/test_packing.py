"""A sample of a plane's bytes decides its mode. Every plane decodes, whatever its other bytes are."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from support.coded import block, decode, encode

from tierfs.codec import Codec, Coding, decode_block
from tierfs.codec.packing import Mode
from tierfs.codec.planes import encode_planes
from tierfs.digest import BLOCK_BYTES

COUNT = 40_001
# The encoder samples each STEP-th of COUNT elements, and the one behind it.
STEP = COUNT // 512 - 1 | 1
LOOKED_AT = np.isin(np.arange(COUNT) % STEP, (0, 1))


def modes(encoded: bytes) -> list[int]:
    """Return the modes of the planes of a PLANE or DPLANE block."""
    return [struct.unpack_from("<BI", encoded, 2 + 5 * index)[0] for index in range(encoded[0])]


def plane(looked_at: np.ndarray, others: np.ndarray) -> bytes:
    """Return bytes of `looked_at` where the encoder samples, and of `others` elsewhere."""
    return np.where(LOOKED_AT, looked_at, others).astype(np.uint8).tobytes()


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, COUNT)


@pytest.mark.parametrize(
    ("content", "width", "kept", "most"),
    [
        ("floats", 4, [Mode.CODES, Mode.RAW, Mode.WOVEN, Mode.WOVEN], 0.84),
        ("floats", 8, [Mode.CODES, Mode.FRAME, *[Mode.WOVEN] * 6], 0.9),
        ("squares", 4, [Mode.CODES, Mode.SEVEN, Mode.WOVEN, Mode.WOVEN], 0.83),
        ("bfloat16", 2, [Mode.CODES, Mode.RAW], 0.68),
        ("rare", 4, [Mode.CONSTANT, Mode.CONSTANT, Mode.CONSTANT, Mode.MOSTLY], 0.02),
    ],
)
def test_planes_are_kept_as_what_they_hold(content: str, width: int, kept: list[Mode], most: float) -> None:
    raw = block(content, COUNT * width, width, 1)
    codec, encoded = encode(raw, Coding(Codec.PLANE, width))
    assert (codec, modes(encoded)) == (Codec.PLANE, kept)
    assert len(encoded) < most * len(raw)
    assert decode(codec, encoded, len(raw)) == raw


def test_even_bytes_are_tried_as_planes() -> None:
    raw = np.arange(COUNT, dtype="<u4").tobytes()
    codec, encoded = encode(raw, Coding(Codec.PLANE, 4))
    assert modes(encoded)[2:] == [Mode.FRAME, Mode.FRAME]
    assert decode(codec, encoded, len(raw)) == raw


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        # The sample suggests a mode that all, most or none of the other bytes fit.
        (plane(noise(1) % 15 + 100, noise(2)), None),
        (plane(noise(1) % 15 + 100, np.where(noise(3) < 1, 7, noise(1) % 15 + 100)), Mode.CODES),
        (plane(noise(1) % 15 + 100, np.where(noise(3) < 40, 7, noise(1) % 15 + 100)), Mode.FRAME),
        (plane(noise(1) % 15 + 250, noise(4) % 15 + 250), Mode.CODES),
        (plane(noise(1) // 2, noise(2)), None),
        (plane(noise(1) // 2, noise(2) // 2), Mode.SEVEN),
        (plane(noise(1), np.zeros(COUNT)), None),
        (plane(np.full(COUNT, 9), noise(2)), None),
        (plane(np.full(COUNT, 9), np.where(noise(3) < 2, 8, 9)), Mode.MOSTLY),
        (plane(np.full(COUNT, 9), np.where(noise(3) < 9, 8, 9)), Mode.FRAME),
        (plane(np.full(COUNT, 9), np.full(COUNT, 9)), None),
    ],
)
def test_unsampled_bytes_may_be_anything(raw: bytes, kept: Mode | None) -> None:
    codec, encoded = encode(raw, Coding(Codec.PLANE, 1))
    assert (modes(encoded) if codec is Codec.PLANE else None) == (None if kept is None else [kept])
    assert decode(codec, encoded, COUNT) == raw


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("count", "step"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (8, 0), (8, 1)])
def test_blocks_that_are_encoded_together_come_back_each(width: int, count: int, step: int) -> None:
    size = min(BLOCK_BYTES, COUNT * width)
    contents = ("floats", "constant", "noise", "squares", "bfloat16", "rare")
    for first in range(len(contents)):
        chosen = [contents[(first + index * step) % len(contents)] for index in range(count)]
        raws = [block(content, size, width, index) for index, content in enumerate(chosen)]
        outs = [memoryview(bytearray(size)) for _ in raws]
        lengths = encode_planes([memoryview(raw) for raw in raws], width, outs)
        assert all(length is not None for length, content in zip(lengths, chosen, strict=True) if content == "rare")
        for raw, out, length in zip(raws, outs, lengths, strict=True):
            assert length is None or decode(Codec.PLANE, bytes(out[:length]), size) == raw


def test_blocks_that_are_alike_are_as_small_together() -> None:
    raws = [memoryview(block("floats", BLOCK_BYTES, 4, seed)) for seed in (1, 2)]
    outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in raws]
    lengths = encode_planes(raws, 4, outs)
    for raw, out, length in zip(raws, outs, lengths, strict=True):
        assert length is not None
        codec, alone = encode(raw, Coding(Codec.PLANE, 4))
        assert abs(length - len(alone)) < 200
        target = memoryview(bytearray(BLOCK_BYTES))
        decode_block(codec, out[:length], target, None, "here")
        assert target == raw
