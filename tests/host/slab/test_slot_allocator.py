"""A `SlotAllocator` allocates no byte twice, loses none, and finds room for every run that fits."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierfs.digest import CHUNK_BYTES
from tierfs.host.slab.allocate import SlotAllocator
from tierfs.host.slab.table import Layout, padded

PAGE = 4096
PAGES, SLOTS = 3 * CHUNK_BYTES // PAGE, 12
lengths = st.one_of(st.just(0), st.integers(1, 40 * PAGE), st.just(CHUNK_BYTES), st.integers(1, CHUNK_BYTES))


class SlotAllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with one character for each page."""

    def __init__(self):
        super().__init__()
        self.layout = Layout.for_data(PAGES * PAGE, slots=SLOTS)
        self.allocator = SlotAllocator(self.layout)
        self.pages = "." * PAGES
        self.slots = {}  # by index: first page, and number of pages
        self.serials = set()

    def mark(self, at, count, letter):
        assert set(self.pages[at : at + count]) == ({"."} if letter == "x" else {"x"})
        self.pages = self.pages[:at] + letter * count + self.pages[at + count :]

    @rule(wanted=st.lists(lengths, min_size=1, max_size=4))
    def take(self, wanted):
        sizes = [padded(max(length, 1)) // PAGE for length in wanted]
        fits = "." * sum(sizes) in self.pages and len(self.slots) + len(wanted) <= SLOTS
        found = self.allocator.take(wanted)
        assert (found is not None) == fits
        following = None
        for (index, serial, offset), size in zip(found or (), sizes, strict=found is not None):
            assert index not in self.slots
            assert serial not in self.serials
            assert following in {None, offset}
            self.serials.add(serial)
            at = (offset - self.layout.data_at) // PAGE
            self.mark(at, size, "x")
            self.slots[index] = (at, size)
            following = offset + size * PAGE

    @rule(data=st.data())
    def give(self, data):
        if self.slots:
            index = data.draw(st.sampled_from(sorted(self.slots)))
            at, size = self.slots.pop(index)
            self.allocator.give(index, self.layout.data_at + at * PAGE)
            self.mark(at, size, ".")

    @rule(data=st.data())
    def shrink(self, data):
        if self.slots:
            index = data.draw(st.sampled_from(sorted(self.slots)))
            at, size = self.slots[index]
            length = data.draw(st.integers(0, size * PAGE))
            kept = padded(max(length, 1)) // PAGE
            self.allocator.shrink(index, self.layout.data_at + at * PAGE, length)
            self.mark(at + kept, size - kept, ".") if kept < size else None
            self.slots[index] = (at, kept)

    @invariant()
    def no_page_is_lost(self):
        if not self.slots:
            whole = self.allocator.take([PAGES * PAGE])
            assert whole is not None
            ((index, serial, offset),) = whole
            self.serials.add(serial)
            self.allocator.give(index, offset)


SlotAllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlotAllocator = SlotAllocatorMachine.TestCase


def test_small_slots_leave_contiguous_room_for_chunks():
    allocator = SlotAllocator(Layout.for_data(2 * CHUNK_BYTES + PAGE, slots=4))
    (small,) = allocator.take([1])
    assert allocator.take([CHUNK_BYTES, CHUNK_BYTES]) is not None
    assert small[2] == Layout.for_data(2 * CHUNK_BYTES + PAGE, slots=4).size - PAGE
    assert allocator.take([1]) is None
