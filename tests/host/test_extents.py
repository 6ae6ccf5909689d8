"""`Extents` allocates no byte twice, loses none, and finds room for everything that fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierfs.host.extents import Extents

ALIGN = 16


class Model:
    """The simple model to compare with: one boolean for each unit, True if allocated."""

    def __init__(self, units):
        self.units = [False] * units

    def runs(self):
        marks = "".join("x" if taken else "." for taken in self.units)
        return [len(run) for run in marks.split("x")]

    def take(self, count, *, last):
        marks = "".join("x" if taken else "." for taken in self.units)
        at = marks.rfind("." * count) if last else marks.find("." * count)
        return at if at >= 0 and self.set(at, count, taken=True) else None

    def set(self, at, count, *, taken):
        good = (
            at >= 0 and at + count <= len(self.units) and all(unit is not taken for unit in self.units[at : at + count])
        )
        if good:
            self.units[at : at + count] = [taken] * count
        return good


lengths = st.integers(1, 12 * ALIGN)
offsets = st.integers(-2, 40).map(lambda unit: unit * ALIGN) | st.integers(-ALIGN, 40 * ALIGN)


class ExtentsMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.extents = Extents(20 * ALIGN + 7, align=ALIGN)
        self.model = Model(20)

    @rule(length=lengths, last=st.booleans())
    def take(self, length, last):
        at = self.model.take(-(-length // ALIGN), last=last)
        assert self.extents.take(length, last=last) == (None if at is None else at * ALIGN)

    @rule(offset=offsets, length=lengths)
    def take_at(self, offset, length):
        expected = not offset % ALIGN and self.model.set(offset // ALIGN, -(-length // ALIGN), taken=True)
        assert self.extents.take_at(offset, length) is expected

    @rule(offset=offsets, length=lengths)
    def give(self, offset, length):
        if not offset % ALIGN and self.model.set(offset // ALIGN, -(-length // ALIGN), taken=False):
            self.extents.give(offset, length)
        else:
            with pytest.raises(ValueError, match="not all allocated"):
                self.extents.give(offset, length)

    @invariant()
    def agree(self):
        taken = sum(self.model.units) * ALIGN
        assert self.extents.size == len(self.model.units) * ALIGN
        assert self.extents.used_bytes == taken
        # Free extents that touch must be merged: two parts would hide a larger one.
        free = [end - start for start, end in zip(self.extents._starts, self.extents._ends, strict=True)]
        assert free == [run * ALIGN for run in self.model.runs() if run]


ExtentsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestExtents = ExtentsMachine.TestCase


@given(st.lists(lengths, max_size=30), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_all_is_free_again_when_all_was_given_back_in_whatever_order(wanted, random):
    extents = Extents(100 * ALIGN, align=ALIGN)
    taken = [(at, length) for length in wanted if (at := extents.take(length)) is not None]
    random.shuffle(taken)
    for at, length in taken:
        extents.give(at, length)
    assert extents.used_bytes == 0
    assert extents.take(extents.size) == 0


@pytest.mark.parametrize("length", [0, -1])
def test_an_extent_has_at_least_one_byte(length):
    extents = Extents(4096)
    for call in (lambda: extents.take(length), lambda: extents.take_at(0, length), lambda: extents.give(0, length)):
        with pytest.raises(ValueError, match="an extent of"):
            call()


def test_an_empty_region_has_room_for_nothing():
    extents = Extents(4095)
    assert extents.take(1) is None
    assert extents.size == 0
