"""All threads of a process share a session. A forked child does not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.forked import answer_of
from support.waiting import HANG_S

from tierfs.objects.backends.shared_session import SharedSession


class Session:
    """Records the process that opened it, and whether it was closed."""

    endpoint = "http://cloud"

    def __init__(self) -> None:
        self.opened_by = os.getpid()
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_all_threads_get_the_same_session() -> None:
    shared = SharedSession("test", Session)
    barrier = threading.Barrier(8)

    def get(_: int) -> Session:
        barrier.wait(HANG_S)
        return shared.get()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(get, range(8)))) == 1


def test_a_session_that_could_not_be_opened_is_opened_by_the_next_call() -> None:
    attempts: list[int] = []

    def connect() -> Session:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return Session()

    shared = SharedSession("test", connect)
    with pytest.raises(OSError, match="not yet"):
        shared.get()
    assert shared.get() is shared.get()
    assert len(attempts) == 2


def test_the_session_is_closed_when_nobody_has_it_any_more() -> None:
    shared = SharedSession("test", Session)
    session = shared.get()
    del shared
    gc.collect()
    assert session.closed


def test_a_close_that_fails_is_passed_over() -> None:
    class Failing(Session):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    shared = SharedSession("test", Failing)
    session = shared.get()
    del shared
    gc.collect()
    assert session.closed


def test_a_child_opens_its_own_and_leaves_its_parents_alone() -> None:
    shared = SharedSession("test", Session)
    session = shared.get()

    def open_own() -> bool:
        nonlocal shared
        own = shared.get()
        del shared
        gc.collect()
        return own.opened_by == os.getpid() and own.closed and not session.closed

    assert answer_of(open_own) == "True"
    assert shared.get() is session


def test_a_child_that_drops_what_it_inherited_closes_nothing() -> None:
    shared = SharedSession("test", Session)
    session = shared.get()

    def drop() -> bool:
        nonlocal shared
        del shared
        gc.collect()
        return session.closed

    assert answer_of(drop) == "False"


@pytest.mark.parametrize("late", [False, True])
def test_sessions_are_closed_when_the_process_ends(late: bool) -> None:
    # `atexit` runs functions in reverse order: one registered before tierfs' runs after it, and opens another session.
    program = f"""
import atexit
if {late}:
    atexit.register(lambda: print("late", shared.get().endpoint))
from tierfs.objects.backends.shared_session import SharedSession
class Session:
    endpoint = "endpoint"
    def close(self):
        print("closed")
shared = SharedSession("test", Session)
shared.get()
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=HANG_S)
    assert ran.stdout.splitlines()[: 1 + late] == ["closed", "late endpoint"][: 1 + late]
