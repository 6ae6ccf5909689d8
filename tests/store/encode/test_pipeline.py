"""Encode the blocks of a chunk, several at once."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoded import encoded_chunk

from tierfs.codec import Codec, Coding, Reason, decode_block
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encode import pipeline as encoding
from tierfs.store.encode.pipeline import BlockPlan, blocks_of, encode_chunk

P2, P4, P8 = (Coding(Codec.PLANE, width) for width in (2, 4, 8))
D4, NOTHING = Coding(Codec.DPLANE, 4), Coding(Codec.STORE)


def floats(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")


def test_blocks_whose_plans_agree_are_encoded_together_and_eight_bases_count(monkeypatch):
    codings = [P4, P4, P4, D4, P4, NOTHING, P4, P4, P2, P2, P4, P8, P8, P4, P4]
    state = floats((len(codings) * BLOCK_BYTES - 40_000) // 4, 1)
    state[BLOCK_BYTES // 4 : BLOCK_BYTES // 2] = 0.5
    raw, bases = memoryview(state).cast("B"), memoryview(state + np.float32(0.001)).cast("B")
    shared = [bytearray(BLOCK_BYTES) for _ in range(8)]
    seen: list[tuple[Codec, int]] = []
    encode_blocks = encoding.encode_blocks

    def plans():
        for number, (coding, base) in enumerate(zip(codings, blocks_of(bases), strict=True)):
            shared[number % 8][: len(base)] = base
            yield BlockPlan(coding, Reason(number % 3), memoryview(shared[number % 8])[: len(base)])

    def seeing(raws, coding, *others):
        seen.append((coding.codec, sum(map(len, raws))))
        return encode_blocks(raws, coding, *others)

    monkeypatch.setattr(encoding, "encode_blocks", seeing)
    blocks = encoded_chunk(raw, plans())
    short = BLOCK_BYTES - 40_000
    assert [count for _, count in seen] == [
        *[3 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES],
        *[2 * BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES, short],
    ]
    assert [block.codec for block in blocks[:6]] == [3, 2, 3, 4, 3, 0]
    assert [block.reason for block in blocks] == [number % 3 for number in range(len(codings))]
    for block, want, base in zip(blocks, blocks_of(raw), blocks_of(bases), strict=True):
        out = memoryview(bytearray(len(want)))
        decode_block(block.codec, memoryview(block.data), out, base, "here")
        assert out == want


def test_blocks_of_different_tensors_are_not_looked_at_together():
    squares = np.square(np.random.default_rng(3).uniform(0.002, 0.02, BLOCK_BYTES // 4)).astype("<f4")
    raw = memoryview(np.concatenate([squares, floats(BLOCK_BYTES // 4, 3)])).cast("B")
    alone = [len(encoded_chunk(block, [BlockPlan(P4, Reason.NO_BASE)])[0].data) for block in blocks_of(raw)]
    found = encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE, None, name) for name in ("v", "m")])
    assert [len(block.data) for block in found] == alone
    assert len(encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 2)[0].data) > alone[0] + 10_000


def test_blocks_that_hardly_shrink_have_room_each():
    rng = np.random.default_rng(4)
    count = 2 * BLOCK_BYTES // 4
    elements = rng.integers(0, 1 << 23, count) | rng.integers(0, 120, count) << 23 | rng.integers(0, 2, count) << 31
    raw = memoryview(elements.astype("<u4")).cast("B")
    for block, want in zip(encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 2), blocks_of(raw), strict=True):
        assert 0.96 < len(block.data) / BLOCK_BYTES < 0.97
        out = memoryview(bytearray(BLOCK_BYTES))
        decode_block(block.codec, memoryview(block.data), out, None, "here")
        assert out == want


def test_a_forbidden_codec_stores_the_block_raw():
    raw = memoryview(floats(BLOCK_BYTES, 2)).cast("B")
    assert {block.codec for block in encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 4)} == {Codec.PLANE}
    stored = encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 4, allowed={Codec.STORE, Codec.DPLANE})
    assert b"".join(block.data for block in stored) == raw
    assert {block.codec for block in stored} == {Codec.STORE}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("encoded", [{0, 1, 3, 5}, {2}, set()], ids=str)
def test_blocks_are_encoded_in_their_own_place_or_beside_the_chunk(encoded, in_place):
    state = floats((6 * BLOCK_BYTES - 40_000) // 4, 7)
    raw = memoryview(bytearray(state.nbytes))
    raw[:] = memoryview(state).cast("B")
    into = raw if in_place else memoryview(bytearray(len(raw)))
    blocks = encode_chunk(
        raw, [BlockPlan(P4 if number in encoded else NOTHING, Reason.NO_BASE) for number in range(6)], into
    )
    assert [block.codec is Codec.PLANE for block in blocks] == [number in encoded for number in range(6)]
    for number, (block, want) in enumerate(zip(blocks, blocks_of(memoryview(state).cast("B")), strict=True)):
        assert block.data.obj is (into if number in encoded else raw).obj
        out = memoryview(bytearray(len(want)))
        decode_block(block.codec, memoryview(block.data), out, None, "here")
        assert out == want
    if not in_place:
        assert raw == memoryview(state).cast("B")
