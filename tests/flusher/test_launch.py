"""Start a process that outlives its starter."""

import os
import signal
import subprocess
import sys
import textwrap
import types

import pytest
from support import asking, forked_flusher
from support.waiting import until

from tierfs.errors import StoreError
from tierfs.host.rpc import launch
from tierfs.host.rpc.launch import spawn, tail


def shell(script):
    return ["/bin/sh", "-c", script]


def ended(launched):
    until(lambda: launched.status() is not None)
    return launched.status()


def test_the_process_has_its_own_session_and_the_root_as_its_directory(tmp_path):
    script = "cat /proc/$$/stat | cut -d' ' -f1,5,6; pwd"
    launched = spawn(shell(script), tmp_path / "log")
    assert ended(launched) == 0
    ids, directory = (tmp_path / "log").read_text().splitlines()
    assert ids.split() == [str(launched.pid)] * 3
    assert directory == "/"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_process_has_the_umask_of_who_started_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        assert ended(spawn(shell("umask"), tmp_path / "log")) == 0
    finally:
        os.umask(before)
    assert int((tmp_path / "log").read_text(), 8) == umask


@pytest.mark.parametrize(("given", "heaps"), [(None, "2"), ("5", "5")])
def test_its_threads_share_two_heaps_unless_the_environment_says(tmp_path, monkeypatch, given, heaps):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    assert ended(spawn(shell("echo $MALLOC_ARENA_MAX"), tmp_path / "log")) == 0
    assert (tmp_path / "log").read_text().split() == [heaps]


def test_numpy_starts_no_threads_in_it(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    count = "import os, numpy; print(len(os.listdir('/proc/self/task')))"
    assert ended(spawn([sys.executable, "-c", count], tmp_path / "log")) == 0
    assert (tmp_path / "log").read_text().split() == ["1"]


def test_the_process_inherits_nothing_but_its_log(tmp_path):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    launched = spawn(["/bin/ls", "-l", "/proc/self/fd"], tmp_path / "log")
    ended(launched)
    os.close(reading)
    os.close(writing)
    assert "pipe:" not in (tmp_path / "log").read_text()


def test_the_flusher_appends_to_a_private_log(tmp_path):
    for word in ("one", "two"):
        assert ended(spawn(shell(f"echo {word}; echo {word}2 >&2"), tmp_path / "log")) == 0
    assert (tmp_path / "log").read_text().split() == ["one", "one2", "two", "two2"]
    assert os.stat(tmp_path / "log").st_mode & 0o777 == 0o600


def test_a_large_log_is_put_aside_once(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LOG_BYTES_MAX", 10)
    for word in ("first-long-word", "second-long-word", "third"):
        ended(spawn(shell(f"echo {word}"), tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "third\n"
    assert (tmp_path / "log.1").read_text() == "second-long-word\n"
    assert len(os.listdir(tmp_path)) == 2


def test_the_last_words_are_those_of_this_process(tmp_path):
    ended(spawn(shell("echo earlier"), tmp_path / "log"))
    launched = spawn(shell("for i in $(seq 100); do echo line $i; done; exit 3"), tmp_path / "log")
    assert ended(launched) == 3
    words = launched.last_words().splitlines()
    assert words[-1] == "line 100"
    assert len(words) == 12
    quiet = spawn(shell("exit 1"), tmp_path / "log")
    ended(quiet)
    assert not quiet.last_words()


def test_the_last_words_on_a_full_disk_say_that_there_was_no_room_for_more(tmp_path, monkeypatch):
    (tmp_path / "log").write_text("one\n")
    monkeypatch.setattr(os, "fstatvfs", lambda _: types.SimpleNamespace(f_bavail=0))
    first, second = tail(tmp_path / "log").splitlines()
    assert first == "one"
    assert "the disk of this log is full" in second


def test_the_end_of_a_log_that_is_not_there_is_empty(tmp_path):
    assert not tail(tmp_path / "absent")


@pytest.mark.parametrize(("program", "log"), [("/no/such/program", "log"), ("/bin/true", "no/such/log")])
def test_a_flusher_that_cannot_start_is_an_error(tmp_path, program, log):
    with pytest.raises(StoreError, match=r"cannot be started: .*No such file"):
        spawn([program], tmp_path / log)


def test_a_signal_that_ended_it_is_its_status(tmp_path):
    launched = spawn(["/bin/sleep", "60"], tmp_path / "log")
    assert launched.status() is None
    os.kill(launched.pid, signal.SIGKILL)
    assert ended(launched) == -signal.SIGKILL


def test_its_end_is_noticed_where_the_program_ignores_its_children(tmp_path):
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert ended(spawn(shell("exit 7"), tmp_path / "log")) == 0  # the kernel keeps no exit status then
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_ended_processes_are_collected_by_the_next_start(tmp_path):
    first = spawn(shell("exit 7"), tmp_path / "log")
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    ended(spawn(shell("exit 0"), tmp_path / "log"))
    with pytest.raises(ChildProcessError):
        os.waitpid(first.pid, os.WNOHANG)
    assert first.status() == 7


STARTER = """
    import os, sys, threading
    from pathlib import Path
    from tierfs.host.rpc.launch import spawn

    def begin():
        print(spawn(["/bin/sleep", "60"], Path(sys.argv[1]) / "log").pid)

    if sys.argv[2] == "atexit":
        import atexit
        atexit.register(begin)
    else:
        begin()
    sys.stdout.flush()
    if sys.argv[2] == "killpg":
        os.killpg(0, 9)
"""


def started_by(tmp_path, how):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(STARTER), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    pid = int(done.stdout)
    try:
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert not done.stderr
    return done.returncode


def test_it_survives_its_starters_process_group(tmp_path):
    assert started_by(tmp_path, "killpg") == -signal.SIGKILL


def test_its_starter_ends_without_a_complaint(tmp_path):
    assert started_by(tmp_path, "end") == 0


def test_it_can_be_started_when_its_starter_is_about_to_end(tmp_path):
    assert started_by(tmp_path, "atexit") == 0


@pytest.fixture(scope="module")
def server():
    """A process that forks others. It has no torch, so that a fork copies little. It stays until this process ends."""
    forked_flusher.zygote.start(os.getpid).join()
    return forked_flusher.zygote


def test_a_forked_child_asks_for_the_status_while_a_thread_of_its_parent_did(server, tmp_path):
    process = server.start(asking.fork_while_asked, tmp_path / "log")
    process.join()
    assert process.exitcode == 0
