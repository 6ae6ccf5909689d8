"""A client reaches the flusher whenever flushers start, retire, die or are replaced."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
from support.fake_flusher import (
    FakeEngine,
    Running,
    connections,
    launcher,
    nobody_holds_the_lock,
    process_client,
)
from support.forked import answer_of, forked, idle_child
from support.waiting import HANG_S, until

from tierfs.errors import FormatError, InvalidInputError, ReadOnlyError, StoreError
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.client import IDLE_MAX, FlusherClient
from tierfs.host.rpc.launch import LOG_NAME, spawn
from tierfs.host.rpc.protocol import LOCK_NAME


class Threads:
    """A launcher that starts flushers on threads and keeps them."""

    def __init__(self, directory, **options):
        self.directory = directory
        self.options = options
        self.all = []

    def __call__(self):
        running = Running(self.directory, **self.options)
        self.all.append(running)
        return running

    def stop(self):
        for running in self.all:
            running.stop()


@pytest.fixture
def threads(directory):
    threads = Threads(directory, linger_s=0)
    yield threads
    threads.stop()


@pytest.fixture(autouse=True)
def no_flusher_left(directory):
    yield
    until(lambda: nobody_holds_the_lock(directory))


def fail_to_launch():
    raise AssertionError("one is running")


# -- starting ----------------------------------------------------------------------------------------------------------


def test_the_first_request_starts_a_flusher_and_the_next_ones_use_it(directory):
    with process_client(directory) as client:
        pids = {client.request("echo")["pid"] for _ in range(5)}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_the_flusher_is_told_hello_with_what_the_client_says(directory, threads):
    with FlusherClient(directory, threads, "1.0", lambda: {"options": {"key": "secret"}}) as client:
        client.request("echo")
    arguments, _ = threads.all[0].engine.hellos[0]
    assert arguments == {"options": {"key": "secret"}, "version": "1.0"}


def test_a_hello_that_has_changed_is_said_on_each_connection_that_is_used_from_then_on(running, directory):
    told = {"options": {"key": "old"}}
    with FlusherClient(directory, fail_to_launch, "1.0", lambda: told) as client:
        client.request("echo")
        waiter = threading.Thread(target=client.request, args=("wait",))
        waiter.start()
        until(lambda: running.engine.waiting)
        told = {"options": {"key": "new"}}
        client.greet_again()
        running.engine.release()
        waiter.join()
        client.request("echo")
        client.request("echo")
    assert [arguments["options"]["key"] for arguments, _ in running.engine.hellos] == ["old", "new"]


def test_a_flusher_that_cannot_start_is_an_error_at_once_that_quotes_its_log(directory):
    (directory / LOG_NAME).write_text("of an earlier one\n")
    argv = [sys.executable, "-c", "import tierfs.flusher.no_such_module"]
    with FlusherClient(directory, lambda: spawn(argv, directory / LOG_NAME), "1.0", dict) as client:
        with pytest.raises(StoreError, match=r"No module named .*no_such_module") as caught:
            client.request("echo")
    assert str(directory / LOG_NAME) in str(caught.value)
    assert caught.value.path == str(directory / LOG_NAME)
    assert not caught.value.transient
    assert "of an earlier one" not in str(caught.value)


def test_a_flusher_that_never_answers_is_an_error_that_names_its_log(directory):
    (directory / LOG_NAME).write_text("rebuilding\n")
    client = FlusherClient(directory, lambda: None, "1.0", dict, start_timeout_s=0.2)
    with pytest.raises(StoreError, match=r"within 0\.2 s.*flusher\.log:\nrebuilding") as caught:
        client.request("echo")
    assert caught.value.transient


def test_a_lock_held_by_one_that_does_not_listen_is_waited_for(directory, threads):
    lock = ExclusiveLock(directory / LOCK_NAME)
    lock.acquire()
    launched_before = []

    def release():
        launched_before.extend(threads.all)
        lock.release()

    threading.Timer(0.3, release).start()
    with FlusherClient(directory, threads, "1.0", dict) as client:
        assert client.request("echo")
    assert not launched_before
    assert len(threads.all) == 1


def test_a_request_whose_time_is_over_before_a_flusher_answers_raises_a_timeout(directory):
    client = FlusherClient(directory, lambda: None, "1.0", dict)
    with pytest.raises(TimeoutError, match="echo"):
        client.request("echo", timeout_s=0.2)


def test_a_listener_that_says_nothing_is_given_up(directory):
    client = FlusherClient(directory, fail_to_launch, "1.0", dict, start_timeout_s=0.2)
    with wire.listen(directory), pytest.raises(StoreError, match="no flusher answered"):
        client.request("echo")


def test_a_directory_that_is_not_there_is_an_error(directory):
    with pytest.raises(StoreError, match="cannot be locked"):
        FlusherClient(directory / "absent", fail_to_launch, "1.0", dict).request("echo")


def test_eight_processes_that_ask_at_once_get_one_flusher(directory):
    reading, writing = os.pipe()

    def launch():
        with open(directory / "launches", "a") as file:
            file.write("one\n")
        return launcher(directory, linger_s=60)()

    def ask():
        with FlusherClient(directory, launch, "1.0", dict) as client:
            os.write(writing, b"%d\n" % client.request("echo")["pid"])

    for child in [forked(ask) for _ in range(8)]:
        assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    with os.fdopen(reading) as file:
        pids = file.read().split()
    os.kill(int(pids[0]), signal.SIGTERM)
    assert len(pids) == 8
    assert len(set(pids)) == 1
    assert (directory / "launches").read_text() == "one\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_listener_of_another_user_is_not_talked_to(public_directory):
    ready, done = os.pipe(), os.pipe()

    def listen():
        os.chown(public_directory, 65534, 65534)
        os.setuid(65534)
        with wire.listen(public_directory):
            os.write(ready[1], b".")
            os.read(done[0], 1)

    child = forked(listen)
    try:
        os.read(ready[0], 1)
        client = FlusherClient(public_directory, fail_to_launch, "1.0", dict)
        with pytest.raises(ReadOnlyError, match="runs as uid 65534, this one as uid 0"):
            client.request("echo")
    finally:
        os.write(done[1], b".")
        os.waitpid(child, 0)
        for descriptor in (*ready, *done):
            os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_socket_that_may_not_be_opened_is_an_error_of_rights(public_directory):
    def as_somebody_else():
        os.setuid(65534)
        with pytest.raises(ReadOnlyError, match="Permission denied"):
            wire.connect(public_directory, 1)
        return True

    with wire.listen(public_directory):
        assert answer_of(as_somebody_else) == "True"


# -- ending ------------------------------------------------------------------------------------------------------------


def test_no_request_is_lost_when_flushers_retire_as_soon_as_they_can(directory, threads):
    # Four threads send a request and disconnect at once, in a loop. The flusher retires whenever no client is left.
    problems, counts = [], []

    def hammer(number):
        try:
            for turn in range(60):
                with FlusherClient(directory, threads, "1.0", dict) as client:
                    assert client.request("echo", {"turn": turn}, timeout_s=HANG_S)["turn"] == turn
                if turn % 4 == number:
                    time.sleep(0.01)
            counts.append(turn + 1)
        except BaseException as error:
            problems.append(error)

    hammers = [threading.Thread(target=hammer, args=(number,)) for number in range(3)]
    for thread in hammers:
        thread.start()
    for thread in hammers:
        thread.join()
    assert not problems
    assert counts == [60] * 3
    assert len(threads.all) > 1
    for running in threads.all:
        running.end()
    assert sum(running.engine.asked.count("echo") for running in threads.all) == 180


@pytest.mark.parametrize("watched", [True, False])
def test_a_flusher_that_others_used_up_before_its_starter_got_to_it_is_started_again(
    directory, threads, monkeypatch, watched
):
    monkeypatch.setattr("tierfs.host.rpc.client._UNWATCHED_S", 0.1)

    def launch():
        first = threads()
        if len(threads.all) == 1:
            until(lambda: wire.identity_of(directory))
            with FlusherClient(directory, fail_to_launch, "1.0", dict) as other:
                other.request("echo")
            first.end()
        return first if watched else None

    with FlusherClient(directory, launch, "1.0", dict) as client:
        client.request("echo", timeout_s=HANG_S)
    assert len(threads.all) == 2


def test_a_request_whose_flusher_is_killed_is_repeated_by_the_next(directory):
    with process_client(directory) as client:
        first = client.request("echo")["pid"]
        assert client.request("die_once")["pid"] != first
        assert (directory / "died").exists()


def test_a_stale_connection_does_not_count_against_a_request(directory):
    with process_client(directory) as client:
        os.kill(client.request("echo")["pid"], signal.SIGKILL)
        assert client.request("die_once")["pid"]


def test_a_flusher_killed_while_several_wait_costs_nobody_an_answer(directory):
    with process_client(directory) as client:
        first = client.request("echo")["pid"]
        answers = []

        def wait():
            with contextlib.suppress(TimeoutError):
                client.request("wait", timeout_s=0.8)
            answers.append(client.request("echo")["pid"])

        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        for thread in waiting:
            thread.join()
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert first not in answers


def test_a_request_that_kills_every_flusher_is_given_up(directory):
    with process_client(directory) as client, pytest.raises(StoreError, match=r"ended 2 times.*asked to die") as caught:
        client.request("die")
    assert caught.value.transient
    assert str(directory / LOG_NAME) in str(caught.value)


def test_a_connection_that_went_stale_while_idle_is_replaced(directory, threads):
    with FlusherClient(directory, threads, "1.0", dict) as client:
        client.request("echo")
        threads.all[0].stop()
        assert client.request("echo")
    assert [running.engine.asked for running in threads.all] == [["echo"], ["echo"]]


def test_an_older_flusher_is_replaced_by_a_newer_client(directory):
    with process_client(directory, "1.9", 60) as old:
        first = old.request("echo")["pid"]
        with process_client(directory, "1.10") as new:
            second = new.request("echo")["pid"]
            assert second != first
            assert old.request("echo")["pid"] == second
            assert new.request("echo")["pid"] == second
            assert connections(new) == connections(old) == 1


def test_a_newer_flusher_continues_an_older_ones_work(directory):
    new_threads = Threads(directory, version="2.0", linger_s=0)
    old_threads = Threads(directory, version="1.0", linger_s=0)
    answers = []
    with (
        FlusherClient(directory, old_threads, "1.0", dict) as old,
        FlusherClient(directory, new_threads, "2.0", dict) as new,
    ):
        waiter = threading.Thread(target=lambda: answers.append(old.request("wait")))
        waiter.start()
        until(lambda: old_threads.all and old_threads.all[0].engine.waiting)
        new.request("echo")
        # The older client may have started another older flusher in between, and a newer one ended without the lock.
        until(lambda: [each for each in new_threads.all if each.engine.waiting])[0].engine.release()
        waiter.join()
    assert len(answers) == 1
    old_threads.stop()
    new_threads.stop()


def test_a_request_outlasts_many_flushers_that_end_in_good_order(directory, threads):
    answers = []
    with FlusherClient(directory, threads, "1.0", dict) as client:
        waiter = threading.Thread(target=lambda: answers.append(client.request("wait")))
        waiter.start()
        for number in range(8):
            until(lambda turn=number: len(threads.all) > turn and threads.all[turn].engine.waiting)
            threads.all[number].stop()
        until(lambda: len(threads.all) == 9)
        threads.all[8].engine.release()
        waiter.join()
    assert len(answers) == 1


def test_a_request_that_each_flusher_ends_at_is_given_up_in_the_end(directory, threads, monkeypatch):
    monkeypatch.setattr("tierfs.host.rpc.client.ATTEMPTS_MAX", 3)
    stopper = threading.Event()

    def stop_all():
        while not stopper.wait(0.01):
            for running in threads.all:
                if running.engine.waiting:
                    running.service.stop()

    thread = threading.Thread(target=stop_all)
    thread.start()
    with FlusherClient(directory, threads, "1.0", dict) as client, pytest.raises(StoreError, match="ended 3 times"):
        client.request("wait")
    stopper.set()
    thread.join()


def test_an_older_client_uses_a_newer_flusher(directory, threads):
    threads.options["version"] = "2.0"
    with (
        FlusherClient(directory, threads, "2.0", dict) as new,
        FlusherClient(directory, fail_to_launch, "1.0", dict) as old,
    ):
        new.request("echo")
        assert old.request("echo")
        assert new.request("echo")
    assert len(threads.all) == 1


def test_several_newer_clients_replace_an_older_flusher_once(directory):
    old_threads = Threads(directory, version="1.0", linger_s=3600)
    old_threads()
    new_threads = Threads(directory, version="2.0", linger_s=0)
    until(lambda: wire.identity_of(directory))
    clients = [FlusherClient(directory, new_threads, "2.0", dict) for _ in range(6)]
    asking = [threading.Thread(target=client.request, args=("echo",)) for client in clients]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(new_threads.all) == 1
    assert new_threads.all[0].engine.asked == ["echo"] * 6
    for client in clients:
        client.close()
    old_threads.stop()
    new_threads.stop()


# -- answers and connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packet", [b"garbage", b'{"id": 99, "ok": {}}', b'{"id": 1}', b"x" * 70_000, b"[]"])
def test_an_answer_that_makes_no_sense_is_an_error(directory, packet):
    def answer_once(listener):
        listener.settimeout(HANG_S)
        connection, _ = listener.accept()
        with connection:
            wire.receive(connection)
            connection.send(packet)

    with wire.listen(directory) as listener:
        thread = threading.Thread(target=answer_once, args=(listener,))
        thread.start()
        with FlusherClient(directory, fail_to_launch, "1.0", dict) as client, pytest.raises(FormatError):
            client.request("echo")
        thread.join()


def test_an_unsendable_request_keeps_the_connection(client):
    with pytest.raises(InvalidInputError, match="over the limit"):
        client.request("echo", {"a": "x" * 70_000})
    assert client.request("echo")


def test_many_threads_ask_at_once_and_a_few_connections_are_kept(client, running):
    problems = []

    def ask(number):
        try:
            for turn in range(30):
                assert client.request("echo", {"a": [number, turn]})["a"] == [number, turn]
        except BaseException as error:
            problems.append(error)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert not problems
    assert connections(client) <= IDLE_MAX
    assert running.engine.asked.count("echo") == 360


def test_an_interrupted_request_leaves_no_connection_with_an_answer_to_come(client, running, monkeypatch):
    receive = wire.receive

    def interrupt(connection):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return receive(connection)

    client.request("echo")
    with monkeypatch.context() as patch:
        patch.setattr(wire, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.request("wait")
    assert not connections(client)
    assert client.request("echo", {"a": 1})["a"] == 1


def test_a_closed_client_keeps_no_connection(client):
    client.request("echo")
    client.close()
    assert not connections(client)
    assert client.request("echo")
    assert not connections(client)


def idle_of(client):
    """Return the one connection that a client keeps open."""
    (idle,) = client._idle
    return idle


def test_a_connection_is_hung_up_even_while_a_process_that_is_being_started_has_a_copy(client, running):
    client.request("echo")
    copy = os.dup(idle_of(client).fileno())
    try:
        client.close()
        until(lambda: running.engine.told_gone)
    finally:
        os.close(copy)


def test_a_client_that_is_forgotten_hangs_up(running, directory):
    client = FlusherClient(directory, fail_to_launch, "1.0", dict)
    client.request("echo")
    seen = weakref.ref(client)
    del client
    gc.collect()
    assert seen() is None
    until(lambda: running.engine.told_gone)


def test_a_forked_child_has_none_of_its_parents_connections_and_does_not_disturb_it(directory):
    with process_client(directory) as client:
        pid = client.request("echo")["pid"]

        def in_the_child():
            assert not connections(client)
            with process_client(directory) as own:
                answers = [own.request("echo", {"a": turn}) for turn in range(20)]
            assert [answer["a"] for answer in answers] == list(range(20))
            return {(answer["pid"], answer["peer"]) for answer in answers} == {(pid, os.getpid())}

        idle = idle_of(client)
        assert answer_of(in_the_child) == "True"
        answer = client.request("echo")
        assert (answer["pid"], answer["peer"]) == (pid, os.getpid())
        assert idle_of(client) is idle


def test_a_child_forked_while_others_ask_holds_no_connection_open(running, directory):
    client = FlusherClient(directory, fail_to_launch, "1.0", dict)

    def wait():
        with pytest.raises(TimeoutError):
            client.request("wait", timeout_s=0.5)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: running.engine.waiting)
    with idle_child():
        waiter.join()
        until(lambda: not running.engine.waiting)


PROGRAM = """
    import os, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from support.fake_flusher import process_client
    client = process_client(Path(sys.argv[1]), linger_s=60)
    print(client.request("echo")["pid"], flush=True)
    if sys.argv[3] == "killpg":
        os.killpg(0, 9)
"""


@pytest.mark.parametrize("how", ["end", "killpg"])
def test_the_flusher_outlives_the_client_that_started_it(directory, how):
    here = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(PROGRAM), str(directory), here, how]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert not done.stderr
    assert done.returncode == (0 if how == "end" else -signal.SIGKILL)
    with process_client(directory) as client:
        pid = client.request("echo")["pid"]
    os.kill(pid, signal.SIGTERM)
    assert pid == int(done.stdout)
    assert (directory / LOG_NAME).read_text() == ""


def test_a_full_backlog_is_waited_for(directory, monkeypatch):
    monkeypatch.setattr(wire, "BACKLOG", 1)
    with wire.listen(directory), contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            for _ in range(5):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.settimeout(0)
                waiting.connect(str(directory / wire.SOCKET_NAME))
        assert wire.connect(directory, 1) is None


def test_a_hello_that_cannot_be_made_costs_no_connection(running, directory):
    def hello():
        raise RuntimeError("no credentials")

    client = FlusherClient(directory, fail_to_launch, "1.0", hello)
    with pytest.raises(RuntimeError, match="no credentials"):
        client.request("echo")
    assert not connections(client)


def test_an_engine_that_refuses_the_hello_is_heard(directory, threads):
    engine = FakeEngine()
    threads.options["engine"] = engine
    plain = engine.handle

    def handle(do, *rest):
        if do == "hello":
            raise ReadOnlyError("these credentials will not do")
        return plain(do, *rest)

    engine.handle = handle
    with FlusherClient(directory, threads, "1.0", dict) as client, pytest.raises(ReadOnlyError, match="will not do"):
        client.request("echo")
    assert not connections(client)
