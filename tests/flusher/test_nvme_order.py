"""Drafts that the flusher persists together in the nvme tier."""

import threading
from types import SimpleNamespace

import pytest

from tierfs.clock import ManualClock
from tierfs.flusher.nvme import BATCH_BYTES_MAX, BATCH_DRAFTS_MAX, NvmePersister
from tierfs.flusher.priority import Priority
from tierfs.flusher.queue import FlushItem, FlushQueue

GIB = 1 << 30


class Drafts:
    """Drafts of made-up files in closing order, and the object that persists them."""

    def __init__(self):
        self.state = SimpleNamespace(
            changed=threading.Condition(),
            entries=FlushQueue(),
            clock=ManualClock(),
            nvme_bytes=4 * GIB,
            nvme=None,
            priority=Priority(),
        )
        self.persister = NvmePersister(self.state)
        self.later = self.state.clock.monotonic() + 10

    def add(self, path, length, *, turn=None, slots=(None,), **what):
        number = len(self.state.entries) + 1
        draft = SimpleNamespace(
            path=path,
            length=length,
            slots=[object() for _ in slots] if slots == (None,) else slots,
            names=[path.encode()] * len(slots),
            write_id=b"%d" % number,
            after=b"",
            base=SimpleNamespace(write_id=b""),
        )
        entry = FlushItem(draft, (turn or number, 0, 0), slot=object())
        for name, value in what.items():
            setattr(entry, name, value)
        self.state.entries.add(entry)
        return entry


@pytest.fixture
def drafts():
    found = Drafts()
    yield found
    found.persister.stop()


def test_small_drafts_go_together_up_to_a_bound_and_a_large_one_alone(drafts):
    small = [drafts.add(f"s/{number}", BATCH_BYTES_MAX // 4) for number in range(5)]
    large = drafts.add("large", GIB)
    assert drafts.persister.batch([*small, large]) == small[:4]
    assert drafts.persister.batch([small[4], large]) == small[4:]
    assert drafts.persister.batch([large, *small]) == [large]


def test_a_retry_and_its_successors_wait_for_their_time(drafts):
    first, second = drafts.add("a", 1), drafts.add("b", 1)
    second.retry_at = drafts.later
    third = drafts.add("c", 1)
    assert drafts.persister.batch([first, second, third]) == [first]
    assert drafts.persister.batch([second, third]) == []


def test_no_more_go_together_than_one_commit_takes(drafts):
    added = [drafts.add(f"s/{number}", 1) for number in range(BATCH_DRAFTS_MAX + 2)]
    assert drafts.persister.batch(drafts.persister.waiting()) == added[:BATCH_DRAFTS_MAX]
