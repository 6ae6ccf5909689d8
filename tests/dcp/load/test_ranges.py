"""Which byte ranges of a chunk hold the elements of a box."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tierfs.dcp.load import coverage
from tierfs.dcp.load.coverage import GAP_BYTES_MAX, READ_BYTES_MAX, BoxExtent, extents_of

MIB = 1 << 20


@st.composite
def boxes(draw, side_max=6, item_sizes=(1, 2, 4, 8, 16)):
    shape = draw(st.lists(st.integers(1, side_max), max_size=4))
    offsets = [draw(st.integers(0, side - 1)) for side in shape]
    lengths = [draw(st.integers(0, side - offset)) for side, offset in zip(shape, offsets, strict=True)]
    return shape, draw(st.sampled_from(item_sizes)), offsets, lengths


def elements(shape, itemsize, offsets, lengths):
    """Return the model: the offset in the chunk of each element of the box, by its index in the box."""
    found = {}
    for place in itertools.product(*map(range, lengths)):
        at = 0
        for side, offset, index in zip(shape, offsets, place, strict=True):
            at = at * side + offset + index
        found[place] = at * itemsize
    return found


def elements_of(extent):
    return {
        tuple(map(sum, zip(extent.offsets, place, strict=True))): extent.at
        + sum(index * stride for index, stride in zip(place, extent.strides, strict=True))
        for place in itertools.product(*map(range, extent.lengths))
    }


def check(box, gap_max, read_max, dense_max):
    shape, itemsize, offsets, lengths = box
    found = {}
    extents = list(extents_of(shape, itemsize, offsets, lengths, dense_bytes_max=dense_max))
    for extent in extents:
        part = elements_of(extent)
        assert not part.keys() & found.keys()
        found |= part
        starts = sorted(part.values())
        assert extent.at == starts[0]
        assert extent.at + extent.length == starts[-1] + itemsize
        assert extent.is_dense == (extent.length == len(starts) * itemsize)
        assert extent.length <= max(itemsize, dense_max if extent.is_dense else read_max)
        assert all(after - before - itemsize <= gap_max for before, after in itertools.pairwise(starts))
    assert found == elements(*box)
    assert [extent.at for extent in extents] == sorted(extent.at for extent in extents)


@given(boxes())
def test_every_element_of_a_box_is_in_one_extent_where_it_lies_in_the_chunk(box):
    check(box, GAP_BYTES_MAX, READ_BYTES_MAX, READ_BYTES_MAX)


@given(boxes(), st.integers(0, 40), st.integers(1, 200), st.integers(1, 200))
def test_extents_keep_to_the_limits_of_gap_and_length(box, gap_max, read_max, dense_max):
    before = coverage.GAP_BYTES_MAX, coverage.READ_BYTES_MAX
    coverage.GAP_BYTES_MAX, coverage.READ_BYTES_MAX = gap_max, read_max
    try:
        check(box, gap_max, read_max, dense_max)
    finally:
        coverage.GAP_BYTES_MAX, coverage.READ_BYTES_MAX = before


def test_a_whole_chunk_is_one_extent_however_long_if_that_is_wanted():
    assert list(extents_of([1 << 20, 1 << 20], 4, [0, 0], [1 << 20, 1 << 20], dense_bytes_max=1 << 62)) == [
        BoxExtent(0, 1 << 42, (0, 0), (1 << 20, 1 << 20), (1 << 22, 4), is_dense=True)
    ]


def test_rows_of_a_wide_chunk_are_one_extent_and_columns_of_a_narrow_one_few():
    rows = list(extents_of([4096, 4096], 2, [1024, 0], [1024, 4096], dense_bytes_max=1 << 62))
    assert [(extent.at, extent.length) for extent in rows] == [(8 * MIB, 8 * MIB)]
    columns = list(extents_of([4096, 4096], 2, [0, 0], [4096, 512]))
    assert len(columns) <= math.ceil(32 / 16) + 1
    assert all(not extent.is_dense for extent in columns)


def test_columns_far_apart_are_extents_of_their_own():
    far = list(extents_of([100, 2 << 20], 1, [0, 5], [100, 10]))
    assert len(far) == 100
    assert all(extent.length == 10 for extent in far)
