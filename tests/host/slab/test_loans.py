"""Nothing that was lent is freed while somebody has it, and nothing is lent any more once it may be freed."""

import os
import uuid

import pytest

from tierfs.clock import SystemClock
from tierfs.errors import NotFoundError
from tierfs.host.host import Host
from tierfs.host.slab.loans import BorrowedLoan, Loans
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import SlotKind

OWNER, SEGMENTS = "0123456789abcdef", ("a" * 32, "b" * 32)
MIB = 1 << 20


@pytest.fixture
def loans(tmp_path):
    return Loans(tmp_path)


def test_a_loan_ends_when_nobody_has_it(loans):
    path = loans.lend(OWNER, SEGMENTS)
    first, second = BorrowedLoan(path), BorrowedLoan(path)
    for borrower in (first, second):
        assert not loans.end(path)
        borrower.release()
        borrower.release()
    assert loans.end(path)
    assert loans.end(path)
    assert list(loans.directory.iterdir()) == []


def test_who_comes_too_late_gets_nothing(loans):
    path = loans.lend(OWNER, SEGMENTS)
    assert loans.end(path)
    with pytest.raises(NotFoundError, match="taken back"):
        BorrowedLoan(path)


def test_what_nobody_has_had_yet_can_be_left(loans):
    path = loans.lend(OWNER, SEGMENTS)
    assert not loans.end(path, only_taken=True)
    BorrowedLoan(path).release()
    assert loans.end(path, only_taken=True)


def test_a_borrower_that_is_dropped_or_dies_has_nothing(loans):
    dropped, killed = loans.lend(OWNER, SEGMENTS), loans.lend(OWNER, SEGMENTS)
    BorrowedLoan(dropped)
    assert loans.end(dropped)
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        kept = BorrowedLoan(killed)
        os.write(tell, b"!")
        os.read(ready, 0)
        os.kill(os.getpid(), 9)
        os._exit(bool(kept))
    os.read(ready, 1)
    os.waitpid(child, 0)
    assert loans.end(killed)
    os.close(ready)
    os.close(tell)


def test_all_loans_of_a_segment_end_or_one_is_held(loans):
    first, second = loans.lend(OWNER, SEGMENTS), loans.lend(OWNER, SEGMENTS[1:])
    borrower = BorrowedLoan(second)
    assert loans.end_all(SEGMENTS[0])
    assert not first.exists()
    assert not loans.end_all(SEGMENTS[1])
    borrower.release()
    assert loans.end_all(SEGMENTS[1])
    assert not second.exists()


def test_what_dead_lenders_left_is_swept(loans):
    free, held = loans.lend(OWNER, SEGMENTS), loans.lend(OWNER, SEGMENTS)
    alive = loans.lend("f" * 16, SEGMENTS)
    borrower = BorrowedLoan(held)
    loans.sweep(lambda owner: owner != OWNER)
    assert [path.exists() for path in (free, held, alive)] == [False, True, True]
    borrower.release()


def test_slots_of_the_dead_are_freed_when_the_borrower_is_done(tmp_path):
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    store = uuid.uuid4().hex

    def ram():
        return RamTier(Host(tmp_path / "state", shm), store, budget_bytes=64 * MIB, clock=SystemClock())

    lender = ram()
    slot = lender.take(SlotKind.CHUNK, MIB, timeout_s=0)
    slot.segment.seal(slot, b"a", b"", stamp_ns=1)
    path = lender.loans.lend(lender.host.owner(), [slot.segment.id])
    borrower = BorrowedLoan(path)
    lender.host._own.release()  # it dies
    flusher = ram()
    assert flusher.reclaim(lambda _: pytest.fail("asked while it is lent")) == 0
    borrower.release()
    assert flusher.reclaim(lambda _: set()) == MIB
    assert not path.exists()
