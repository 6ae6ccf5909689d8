"""A flusher's process yields processors to training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.flusher import priority
from tierfs.flusher.priority import NICER, give_way

CODE = """
import os
from tierfs.flusher.priority import give_way
give_way()
print(os.getpriority(os.PRIO_PROCESS, 0))
try:
    print(open("/proc/self/autogroup").read())
except FileNotFoundError:
    pass
"""


class Session:
    """Stands in for ``/proc/self/autogroup``. Raises the given errors first, then accepts a write."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.said = []

    def write_text(self, text):
        if self.errors:
            raise self.errors.pop(0)
        self.said.append(text)


@pytest.fixture
def nicer(monkeypatch):
    asked = []
    monkeypatch.setattr(priority, "_ATTEMPT_S", 0.0)
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    return asked


def test_a_process_and_its_session_give_way():
    done = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, start_new_session=True
    )
    said = done.stdout.split("\n")
    assert int(said[0]) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICER, 19)
    if Path("/proc/self/autogroup").exists() and said[1].startswith("/autogroup"):
        assert said[1].endswith(f" nice {NICER}")


def test_a_session_that_cannot_be_changed_right_now_is_changed_a_little_later(nicer, monkeypatch, caplog):
    session = Session(BlockingIOError(), BlockingIOError())
    monkeypatch.setattr(priority, "_SESSION", session)
    assert give_way()
    assert (nicer, session.said) == ([NICER], [str(NICER)])
    assert not caplog.records


@pytest.mark.parametrize("errors", [[PermissionError("no")], [BlockingIOError()] * 9], ids=["never", "not now"])
def test_a_session_that_cannot_be_changed_is_told_of(nicer, monkeypatch, caplog, errors):
    session = Session(*errors)
    monkeypatch.setattr(priority, "_SESSION", session)
    caplog.set_level("INFO", "tierfs.flush")
    assert not give_way()
    assert (nicer, session.said) == ([NICER], [])
    assert "competes with training for the processors" in caplog.text


def test_a_session_that_is_somebody_elses_stays_as_it_is(nicer, monkeypatch):
    session = Session()
    monkeypatch.setattr(priority, "_SESSION", session)
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    assert give_way()
    assert (nicer, session.said) == ([NICER], [])


def test_no_priority_is_set_without_autogroups(nicer, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(priority, "_SESSION", tmp_path / "none" / "autogroup")
    caplog.set_level("INFO", "tierfs.flush")
    assert give_way()
    assert nicer == [NICER]
    assert not caplog.records
