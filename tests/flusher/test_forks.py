"""A process forks while its other threads hold locks. The child has none of these threads and must not hang."""

import os
import signal
import threading

import pytest

from tierfs.errors import StoreError
from tierfs.host.name_locks import NameLocks

CHILD_S = 10


def flown(locks):
    with locks.single_flight(b"a chunk"):
        pass


def child_of(task):
    """Run a task in a forked child and return its wait status. SIGALRM kills the child if the task hangs."""
    pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            signal.alarm(CHILD_S)
            task()
            failed = 0
        finally:
            os._exit(failed)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def locks(tmp_path):
    locks = NameLocks(tmp_path / "fetches.lock")
    yield locks
    locks.close()


def test_a_lock_is_waited_for_until_the_timeout(locks):
    def hold_in_vain():
        with pytest.raises(StoreError) as caught, locks.alone(b"a chunk", timeout_s=0.1):
            pass
        assert caught.value.transient
        with locks.alone(b"another chunk", timeout_s=0):
            pass

    with locks.single_flight(b"a chunk"):
        assert child_of(hold_in_vain) == 0
        thread = threading.Thread(target=hold_in_vain)
        thread.start()
        thread.join()
    with locks.alone(b"a chunk", timeout_s=0):
        pass


def test_a_lock_of_a_killed_process_is_free(locks):
    def be_killed():
        with locks.single_flight(b"a chunk"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(child_of(be_killed)) == signal.SIGKILL
    with locks.alone(b"a chunk", timeout_s=0):
        pass
