"""Limits of the flusher's process: raised, said, and a reason to end."""

import errno
import subprocess
import sys

import pytest

from tierfs.errors import StoreError
from tierfs.flusher import limits
from tierfs.flusher.limits import Refusals, shortage

RAISE = """
import resource
from tierfs.flusher.limits import is_short_of_memory, raise_limits
NAMES = ("AS", "DATA", "NOFILE", "NPROC", "FSIZE")
raise_limits()
print(*(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in NAMES), is_short_of_memory())
"""


def caused(error):
    """One of ours that came of it."""
    found = StoreError("it cannot be done")
    found.__cause__ = error
    return found


def raised(ulimits):
    command = f"{ulimits}; exec {sys.executable} -c '{RAISE}'"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_soft_limits_are_raised_to_the_hard_ones():
    hard = "ulimit -Hv 9000000; ulimit -Hd 8000000; ulimit -Hn 1000; ulimit -Hu 5000; ulimit -Hf 7000"
    soft = "ulimit -Sv 4000000; ulimit -Sd 3000000; ulimit -Sn 100; ulimit -Su 4000; ulimit -Sf 10"
    sizes = [9_000_000 * 1024, 8_000_000 * 1024, 1000, 5000, 7000 * 1024]
    assert raised(f"{soft}; {hard}") == [*map(str, sizes), "True"]


def test_what_is_unlimited_stays_so_and_descriptors_are_bounded(monkeypatch):
    set_to = {}
    monkeypatch.setattr(
        "resource.getrlimit", lambda which: (1024, -1) if which == limits.resource.RLIMIT_NOFILE else (-1, -1)
    )
    monkeypatch.setattr("resource.setrlimit", lambda which, pair: set_to.update({which: pair}))
    limits.raise_limits()
    assert set_to == {limits.resource.RLIMIT_NOFILE: (limits.DESCRIPTORS_ENOUGH, -1)}
    assert not limits.is_short_of_memory()


def test_a_limit_that_nobody_may_raise_stays(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))

    def refuse(which, pair):
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr("resource.setrlimit", refuse)
    limits.raise_limits()


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
        (OSError(errno.EMFILE, "Too many open files"), "open files"),
        (caused(OSError(errno.EMFILE, "Too many open files")), "open files"),
        (caused(caused(MemoryError())), "memory"),
    ],
)
def test_what_is_lacking_is_said_with_the_limits_and_what_to_do(error, lacking, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (300 << 20, 300 << 20))
    words = shortage(error)
    assert f"no more {lacking} (300 MiB of address space (ulimit -v)" in words
    assert "`tierfs flusher stop URL`" in words


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), RuntimeError("else"), OSError(errno.EIO, "no"), StoreError("no")]
)
def test_nothing_is_lacking_where_another_error_came_up(error):
    assert shortage(error) is None


def test_refusals_are_hopeless_when_they_last_and_nobody_was_served(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("tierfs.flusher.limits.time.monotonic", lambda: now[0])
    refusals = Refusals()

    def refuse_until(end):
        while now[0] < end:
            refusals.note(MemoryError())
            now[0] += 0.01

    refuse_until(104)
    refusals.end()
    refuse_until(108)
    assert not refusals.are_hopeless
    refuse_until(110)
    assert refusals.are_hopeless
    assert len(caplog.records) == 1
    now[0] += limits.SAID_EVERY_S
    refusals.note(MemoryError())
    assert len(caplog.records) == 2
    refusals.end()
    assert not refusals.are_hopeless


def test_refusals_that_are_far_apart_are_not_hopeless(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tierfs.flusher.limits.time.monotonic", lambda: now[0])
    refusals = Refusals()
    refusals.note(MemoryError())
    now[0] += 2 * limits.SAID_EVERY_S
    refusals.note(MemoryError())
    assert not refusals.are_hopeless
