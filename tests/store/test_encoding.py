"""The blocks of a chunk, some of them encoded together."""

from __future__ import annotations

import contextlib

import numpy as np

from tierfs.codec import Codec, Coding, Reason, decode_block
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encoding import Plan, blocks_of, encode_chunk

P2, P4, P8 = (Coding(Codec.PLANE, width) for width in (2, 4, 8))
D4, NOTHING = Coding(Codec.DPLANE, 4), Coding(Codec.STORE)


def floats(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")


def test_blocks_whose_plans_agree_are_encoded_together_and_a_base_counts_until_the_next_one():
    codings = [P4, P4, P4, D4, P4, NOTHING, P4, P4, P2, P2, P4, P8, P8, P4, P4]
    state = floats((len(codings) * BLOCK_BYTES - 40_000) // 4, 1)
    state[BLOCK_BYTES // 4 : BLOCK_BYTES // 2] = 0.5
    raw, bases = memoryview(state).cast("B"), memoryview(state + np.float32(0.001)).cast("B")
    shared = bytearray(BLOCK_BYTES)
    seen: list[tuple[Codec, int]] = []

    def plans():
        for number, (coding, base) in enumerate(zip(codings, blocks_of(bases), strict=True)):
            shared[: len(base)] = base
            yield Plan(coding, Reason(number % 3), memoryview(shared)[: len(base)])

    @contextlib.contextmanager
    def watch(codec, count):
        seen.append((codec, count))
        yield

    blocks = encode_chunk(raw, plans(), watch=watch)
    short = BLOCK_BYTES - 40_000
    assert [count for _, count in seen] == [
        *[2 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES],
        *[BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES, short],
    ]
    assert [block.codec for block in blocks[:6]] == [3, 2, 3, 4, 3, 0]
    assert [block.reason for block in blocks] == [number % 3 for number in range(len(codings))]
    for block, want, base in zip(blocks, blocks_of(raw), blocks_of(bases), strict=True):
        out = memoryview(bytearray(len(want)))
        decode_block(block.codec, memoryview(block.data), out, base, "here")
        assert out == want


def test_what_may_not_be_made_of_a_block_is_stored():
    raw = memoryview(floats(BLOCK_BYTES, 2)).cast("B")
    assert {block.codec for block in encode_chunk(raw, [Plan(P4, Reason.NO_BASE)] * 4)} == {Codec.PLANE}
    stored = encode_chunk(raw, [Plan(P4, Reason.NO_BASE)] * 4, {Codec.STORE, Codec.DPLANE})
    assert b"".join(block.data for block in stored) == raw
    assert {block.codec for block in stored} == {Codec.STORE}
