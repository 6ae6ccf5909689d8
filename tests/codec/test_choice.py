"""Which codec `choose` picks for a tensor, from a sample of it."""

from __future__ import annotations

import os

import numpy as np

from tierfs.codec import Codec
from tierfs.codec.choice import BYTES_EQUAL, DELTA_WORTH, SAMPLE_BYTES, Choice, choose


def of(sample: bytes, base: bytes | None, kind: str = "bytes", width: int = 1) -> Choice:
    out = memoryview(bytearray(2 * SAMPLE_BYTES))
    reference = None if base is None else memoryview(base)
    return choose(memoryview(sample), kind=kind, width=width, base=reference, allowed=set(Codec), out=out)


def partly(base: bytes, share: float) -> bytes:
    """Return noise with evenly spaced bytes of the base; they make up `share` of it."""
    found = np.frombuffer(os.urandom(len(base)), np.uint8).copy()
    found[:: round(1 / share)] = np.frombuffer(base, np.uint8)[:: round(1 / share)]
    return found.tobytes()


def test_bytes_are_not_tried_against_an_unlike_base() -> None:
    base = os.urandom(SAMPLE_BYTES)
    greater = bytes((byte + 1) % 256 for byte in base)
    assert of(greater, base).delta_ratio == 1
    assert of(greater, base, "float").delta_ratio < 0.1
    assert of(partly(base, 2 * BYTES_EQUAL), base).delta_ratio < 1


def test_a_forbidden_codec_is_not_estimated() -> None:
    # Where many elements differ, SPARSE turns into DPLANE. If DPLANE is forbidden, no delta is chosen.
    numbers = np.random.default_rng(0).standard_normal(SAMPLE_BYTES // 4).astype("<f4")
    differs = np.random.default_rng(1).random(numbers.size) < 0.35
    near = np.where(differs, numbers * np.float32(1 + 1e-5), numbers).astype("<f4").tobytes()
    out, base = memoryview(bytearray(SAMPLE_BYTES)), memoryview(numbers.tobytes())
    for allowed, expected in (({Codec.SPARSE}, None), ({Codec.SPARSE, Codec.DPLANE}, Codec.DPLANE)):
        found = choose(memoryview(near), kind="float", width=4, base=base, allowed=allowed | {Codec.PLANE}, out=out)
        assert found.static.codec is Codec.PLANE
        assert (found.delta and found.delta.codec) is expected


def test_a_base_that_saves_too_little_counts_as_none() -> None:
    sample = os.urandom(SAMPLE_BYTES)
    assert of(sample, os.urandom(SAMPLE_BYTES)).delta is None
    assert of(sample, sample).delta is not None
    found = of(partly(sample, 0.1), sample)
    assert found.delta_ratio is not None
    assert DELTA_WORTH * found.static_ratio < found.delta_ratio < found.static_ratio
    assert found.delta is None


def test_numbers_without_a_name_are_taken_for_numbers() -> None:
    numbers = np.random.default_rng(1).standard_normal(SAMPLE_BYTES // 2).astype(np.float16)
    found = of(memoryview(numbers.tobytes()), None)
    assert (found.static.codec, found.static.width) == (Codec.PLANE, 2)
    assert of(memoryview(b"a line of text\n" * 5000), None).static.codec is Codec.ZSTD
