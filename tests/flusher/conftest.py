"""Flushers on threads of this process, and a check that each test leaves nothing behind."""

import contextlib
import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest
from support.fake_flusher import Running
from support.opened import descriptors
from support.waiting import until

from tierfs.host.rpc.client import FlusherClient


@pytest.fixture
def directory(tmp_path):
    os.chmod(tmp_path, 0o700)
    return tmp_path


@pytest.fixture
def public_directory():
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory(prefix="tierfs-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture
def start(directory):
    """A function that starts flushers, by default in ``directory``. The fixture stops them all at the end."""
    with contextlib.ExitStack() as stack:

        def begin(**options):
            running = Running(options.pop("directory", directory), **options)
            stack.callback(running.stop)
            return running

        yield begin


@pytest.fixture
def running(start):
    running = start()
    until(lambda: running.service._identity)
    return running


@pytest.fixture
def client(running, directory):
    def launch():
        raise AssertionError("one is running")

    with FlusherClient(directory, launch, "1.0", dict) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that no descriptor, thread or running child process stays behind. The next start collects zombies."""
    before = descriptors(), children()
    yield
    until(lambda: not threads(), every_s=0.01)
    # Only the garbage collector frees objects in a reference cycle.
    until(lambda: (descriptors() <= before[0] and children() <= before[1]) or gc.collect() < 0, every_s=0.02)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("tierfs-flusher")]


def children():
    found = set()
    for threads_children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in threads_children.read_text().split():
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.add(child)
    return found
