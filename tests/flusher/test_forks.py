"""A process forks while its other threads hold locks. The child has none of these threads and must not hang."""

import os
import signal
import threading

import pytest
from support.forked import in_child

from tierfs.errors import StoreError
from tierfs.host.name_locks import NameLocks


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
        assert in_child(hold_in_vain) == 0
        thread = threading.Thread(target=hold_in_vain)
        thread.start()
        thread.join()
    with locks.alone(b"a chunk", timeout_s=0):
        pass


def test_a_lock_of_a_killed_process_is_free(locks):
    def be_killed():
        with locks.single_flight(b"a chunk"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_child(be_killed)) == signal.SIGKILL
    with locks.alone(b"a chunk", timeout_s=0):
        pass
