"""A flusher's process yields processors to training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.cli.commands.flusher import NICER, give_way

CODE = """
import os
from tierfs.cli.commands.flusher import give_way
give_way()
print(os.getpriority(os.PRIO_PROCESS, 0))
try:
    print(open("/proc/self/autogroup").read())
except FileNotFoundError:
    pass
"""


@pytest.fixture
def nicer(monkeypatch):
    asked = []
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


def test_a_session_that_cannot_be_changed_is_told_of(nicer, tmp_path, caplog):
    assert not give_way(tmp_path)  # a directory cannot be written
    assert nicer == [NICER]
    assert "competes with training for the processors" in caplog.text


@pytest.mark.parametrize("is_its_own", [True, False], ids=["no autogroups", "the session of another process"])
def test_no_priority_is_set_of_a_session_that_has_none_or_is_not_its_own(
    nicer, monkeypatch, tmp_path, caplog, is_its_own
):
    session = tmp_path / "autogroup"
    if not is_its_own:
        session.write_text("0")
        monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    assert give_way(session)
    assert nicer == [NICER]
    assert not caplog.records
    assert is_its_own or session.read_text() == "0"
