"""A flusher's process yields processors to training, unless a program waits for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.flusher.priority import NICER, Priority

CODE = """
import os, sys, threading
from tierfs.flusher.priority import Priority

def say(*_):
    print(os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/autogroup").read().strip())

priority = Priority(10)
priority.lower_session(True)
lowered = threading.Thread(target=lambda: (priority.lower_thread(), say()))
lowered.start()
lowered.join()
threading.Event().wait(0.15)  # the kernel allows ten changes a second
priority.lower_session(False)
say()
assert not priority.is_refused
"""


@pytest.fixture
def led(monkeypatch):
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())  # as in a process that was started for a flusher


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_thread_gives_way_for_good_and_a_session_for_a_while():
    argv = [sys.executable, "-c", CODE]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, start_new_session=True)
    low, high = done.stdout.splitlines()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert low.startswith(f"{min(own + NICER, 19)} ")
    assert low.endswith(f" nice {NICER}")
    assert high.startswith(f"{own} ")
    assert high.endswith(" nice 0")


def test_a_session_that_cannot_be_changed_is_told_of(led, tmp_path, caplog):
    assert Priority(NICER, tmp_path).is_refused  # a directory cannot be written
    assert "competes with training for the processors" in caplog.text


def test_a_change_that_the_kernel_defers_is_tried_again(led, monkeypatch, tmp_path, caplog):
    session = tmp_path / "autogroup"
    session.touch()
    priority = Priority(NICER, session)
    with monkeypatch.context() as busy:
        busy.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(BlockingIOError()))
        priority.lower_session(True)
    assert session.read_text() == "0"
    priority.lower_session(True)
    assert session.read_text() == str(NICER)
    assert not priority.is_refused
    assert not caplog.records


def test_a_flusher_that_was_not_started_for_a_client_keeps_its_priority(led, tmp_path):
    session = tmp_path / "autogroup"
    session.write_text("3")
    priority = Priority(session=session)
    priority.lower_session(True)
    priority.lower_thread()
    assert session.read_text() == "3"


@pytest.mark.parametrize("is_there", [True, False], ids=["the session of another process", "no autogroups"])
def test_a_session_that_is_not_its_own_stays_as_it_is(monkeypatch, tmp_path, caplog, is_there):
    session = tmp_path / "autogroup"
    if is_there:
        session.write_text("3")
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid() if is_there else os.getpid())
    priority = Priority(NICER, session)
    priority.lower_session(True)
    assert session.exists() == is_there
    assert not is_there or session.read_text() == "3"
    assert not priority.is_refused
    assert not caplog.records
