"""Parts of a file are filled from its chunks, and parts of a chunk from its blocks, with no other reads."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.digest import BLOCK_BYTES
from tierfs.format.envelope import BlockTargets, by_chunk, runs_of


@st.composite
def files(draw):
    """Return the boundaries of a file's chunks, and parts of it, which may overlap and be empty."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    pairs = draw(st.lists(st.tuples(st.integers(0, starts[-1]), st.integers(0, starts[-1])), max_size=8))
    return starts, [(min(pair), memoryview(bytearray(max(pair) - min(pair)))) for pair in pairs]


@given(files())
def test_parts_of_a_file_are_cut_where_chunks_end(file):
    starts, parts = file
    content = random.Random(starts[-1]).randbytes(starts[-1])
    for index, wanted in by_chunk(parts, starts).items():
        chunk = content[starts[index] : starts[index + 1]]
        assert wanted
        for start, out in wanted:
            assert 0 < len(out) <= len(chunk) - start
            out[:] = chunk[start : start + len(out)]
    assert all(out == content[start : start + len(out)] for start, out in parts)


@given(st.sets(st.integers(0, 20)))
def test_numbers_side_by_side_are_one_range(numbers):
    runs = runs_of(sorted(numbers))
    assert [number for run in runs for number in run] == sorted(numbers)
    assert all(before.stop < after.start for before, after in itertools.pairwise(runs))


EDGES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES - 7, 3 * BLOCK_BYTES + 5]
CONTENT = random.Random(7).randbytes(EDGES[-1])


@settings(deadline=None)  # some examples take a while on a busy machine
@given(st.lists(st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES)), min_size=1, max_size=6))
def test_every_part_is_filled_from_the_blocks_it_lies_in(pairs):
    parts = [(min(pair), memoryview(bytearray(max(pair) - min(pair)))) for pair in pairs]
    lent = []
    targets = BlockTargets(len(CONTENT), parts, lambda length: lent.append(length) or memoryview(bytearray(length)))
    ends = [(start // BLOCK_BYTES, (start + len(out) - 1) // BLOCK_BYTES) for start, out in parts if len(out)]
    assert set(targets.blocks) == {block for first, last in ends for block in range(first, last + 1)}
    for block in targets.blocks:
        piece = CONTENT[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert any(
            len(out) and start < (block + 1) * BLOCK_BYTES and start + len(out) > block * BLOCK_BYTES
            for start, out in parts
        )
        targets.view(block)[:] = piece
    targets.finish()
    assert all(out == CONTENT[start : start + len(out)] for start, out in parts)


@pytest.mark.parametrize(
    ("spans", "beside"),
    [
        ([(0, len(CONTENT))], 0),
        ([(0, BLOCK_BYTES), (BLOCK_BYTES, len(CONTENT))], 0),
        ([(5, 10)], BLOCK_BYTES),
        (
            [(0, 100), (100, 2 * BLOCK_BYTES)],
            BLOCK_BYTES,
        ),  # two parts share the first block; the second block goes straight into its part
        ([(0, BLOCK_BYTES), (7, 9)], 0),
        ([(3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1)], 5),
    ],
)
def test_a_whole_block_is_read_without_another_buffer(spans, beside):
    lent = []
    parts = [(start, memoryview(bytearray(end - start))) for start, end in spans]
    BlockTargets(len(CONTENT), parts, lambda length: lent.append(length) or memoryview(bytearray(length)))
    assert sum(lent) == beside
