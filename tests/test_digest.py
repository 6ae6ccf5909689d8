"""Digests are computed without Python's lock."""

import sys
import threading
import time

import pytest

from tierfs.digest import DigestKind, hash_bytes


@pytest.fixture
def no_switching():
    """Threads run until they release Python's lock themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", DigestKind)
@pytest.mark.usefixtures("no_switching")
def test_other_threads_run_while_bytes_are_hashed(kind):
    if kind is DigestKind.BLAKE3:
        pytest.importorskip("blake3")
    data = bytes(64 << 20)
    calls, times = [], []

    def hash_often():
        while len(times) < 50 and len(calls) < 500:
            begin = time.perf_counter()
            hash_bytes(kind, data)
            calls.append((begin, time.perf_counter()))

    thread = threading.Thread(target=hash_often)
    thread.start()
    while thread.is_alive():
        times.append(time.perf_counter())
        time.sleep(0)
    assert any(begin < one < end for begin, end in calls for one in times)
