"""One of the processes that want a chunk fetches it. The others wait, for a limited time."""

import threading

import pytest
from support.waiting import HANG_S

from tierfs.clock import ManualClock
from tierfs.host.name_locks import PATIENCE_S, NameLocks


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def locks(tmp_path, clock):
    locks = NameLocks(tmp_path / "fetch.lock", clock=clock)
    yield locks
    locks.close()


@pytest.fixture
def elsewhere(tmp_path):
    """The locks of another process: the same file, opened anew."""
    locks = NameLocks(tmp_path / "fetch.lock")
    yield locks
    locks.close()


def test_a_chunk_is_fetched_without_one_who_was_stopped(locks, elsewhere, clock, caplog):
    begun = clock.monotonic()
    with elsewhere.single_flight(b"a"):
        for _ in range(2):
            with locks.single_flight(b"a"), locks.single_flight(b"b"):
                pass
    waited_s = clock.monotonic() - begun
    assert 2 * PATIENCE_S <= waited_s < 2 * PATIENCE_S + 1
    assert caplog.text.count("was stopped") == 1
    with locks.single_flight(b"a"):
        pass
    assert clock.monotonic() == begun + waited_s


def test_a_thread_is_not_waited_for_for_good_either(locks, clock):
    begun = clock.monotonic()
    with locks.single_flight(b"a"):
        with locks.single_flight(b"a"):
            pass
        assert PATIENCE_S <= clock.monotonic() - begun < PATIENCE_S + 1
        # The second caller gave up waiting and held no lock, so the first one still holds it.
        with locks.single_flight(b"a"):
            pass
        assert clock.monotonic() - begun >= 2 * PATIENCE_S


def test_a_working_holder_is_waited_for(elsewhere, tmp_path):
    done = []

    def fetch(locks):
        with locks.single_flight(b"a"):
            done.append("second")

    here = NameLocks(tmp_path / "fetch.lock")
    threads = [threading.Thread(target=fetch, args=(locks,)) for locks in (elsewhere, here)]
    with elsewhere.single_flight(b"a"):
        for thread in threads:
            thread.start()
        threads[0].join(0.05)
        done.append("first")
    for thread in threads:
        thread.join(HANG_S)
    here.close()
    assert done == ["first", "second", "second"]


def test_closing_lets_go_of_what_is_held(locks, elsewhere):
    with locks.alone(b"a", timeout_s=1):
        locks.close()
    with elsewhere.alone(b"a", timeout_s=1):
        pass
    with locks.alone(b"a", timeout_s=1):
        pass
