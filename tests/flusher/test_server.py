"""The flusher's service: which clients it serves or rejects, and when it retires."""

import array
import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from support.fake_flusher import FakeEngine, Running, launcher, nobody_holds_the_lock
from support.forked import answer_of, forked, idle_child, in_child
from support.waiting import HANG_S, until

from tierfs.clock import ManualClock
from tierfs.errors import CapacityError, InvalidInputError, StoreError
from tierfs.flusher import server as service_module
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.protocol import LOCK_NAME


@contextlib.contextmanager
def raw_connection(directory, *, greet=True):
    with dial(directory) as connection:
        if greet:
            ask(connection, "hello", {"version": "1.0"})
        yield connection


def dial(directory):
    found = []
    until(lambda: (connection := wire.connect(directory, 5)) and not found.append(connection))
    return found[0]


def nobody_listens(directory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0)  # a full backlog means that a process listens
        try:
            connection.connect(str(directory / wire.SOCKET_NAME))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except BlockingIOError:
            pass
        return False


def ask(connection, do, arguments=None):
    wire.send(connection, wire.encode({"id": 7, "do": do, "arguments": arguments or {}}))
    return wire.receive(connection)


def is_closed(connection):
    try:
        return wire.receive(connection) is None
    except ConnectionResetError:
        return True


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_by_the_engine(client):
    assert client.request("echo", {"a": [1, "é"]}) == {"a": [1, "é"], "pid": os.getpid(), "peer": os.getpid()}


def test_errors_of_the_engine_are_raised_at_the_client(client):
    with pytest.raises(CapacityError, match="all is dirty") as caught:
        client.request("full")
    assert (caught.value.path, caught.value.tier) == ("a/b", "nvme")
    with pytest.raises(TimeoutError, match="not in time"):
        client.request("late")


def test_an_unknown_request_is_an_error_and_the_next_works(client, running):
    client.request("echo")
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="what is that"):
            client.request("fly")
    assert len(running.engine.hellos) == 1


def test_a_mistake_in_the_engine_is_logged_and_told(client, caplog):
    with pytest.raises(StoreError, match="the flusher failed: ZeroDivisionError"):
        client.request("bug")
    assert "ZeroDivisionError" in caplog.text
    assert client.request("echo")["pid"]


def test_an_answer_that_is_too_long_is_an_error(client):
    with pytest.raises(InvalidInputError, match="over the limit"):
        client.request("large")


def test_the_engine_learns_who_asks(client, running):
    client.request("echo")
    ((arguments, peer),) = running.engine.hellos
    assert arguments == {"version": "1.0"}
    assert (peer.pid, peer.version) == (os.getpid(), "1.0")


# -- clients that break the protocol -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        b"garbage",
        b"x" * 70_000,
        b'{"do": "echo"}',
        b'{"id": true, "do": "echo"}',
        b'{"id": 1, "do": 3}',
        b'{"id": 1, "do": "echo", "arguments": []}',
        b"",
    ],
    ids=lambda packet: repr(packet[:24]),
)
@pytest.mark.parametrize("greet", [True, False])
def test_malformed_input_closes_its_own_connection_only(client, directory, packet, greet):
    client.request("echo")
    with raw_connection(directory, greet=greet) as connection:
        connection.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        assert is_closed(connection)
    assert client.request("echo")["pid"] == os.getpid()


@pytest.mark.parametrize(
    "first", [("echo", {"version": "1"}), ("hello", {}), ("hello", {"version": 1}), ("retire", {})]
)
def test_a_connection_that_does_not_begin_with_hello_is_closed(running, directory, first):
    with raw_connection(directory, greet=False) as connection:
        assert ask(connection, *first) is None
    assert not running.engine.hellos
    assert not running.engine.told_gone


def test_a_connection_is_closed_even_while_a_process_that_is_being_started_has_a_copy(running, directory):
    with raw_connection(directory) as connection:
        (ours,) = until(lambda: list(running.service._connections))
        copy = os.dup(ours)
        try:
            connection.send(b"garbage")
            connection.settimeout(HANG_S)
            assert is_closed(connection)
        finally:
            os.close(copy)


def test_a_client_that_does_not_read_its_answers_is_closed(client, directory):
    with raw_connection(directory) as connection:
        connection.settimeout(HANG_S)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(10_000):
                wire.send(connection, wire.encode({"id": 1, "do": "echo", "arguments": {"a": "x" * 50_000}}))
    assert client.request("echo")


def test_connections_that_say_nothing_hold_up_nobody(client, directory):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(raw_connection(directory, greet=False))
        assert client.request("echo")


@pytest.fixture
def three_connections(monkeypatch):
    """Let the flusher have three connections, one of which is that of `client`."""
    monkeypatch.setattr(service_module, "CONNECTIONS_MAX", 3)


@pytest.mark.usefixtures("three_connections")
def test_an_idle_connection_makes_room_where_there_are_too_many(client, directory):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw_connection(directory)) for _ in range(3)]
        assert client.request("echo")
        assert is_closed(idle[0])
        assert ask(idle[2], "echo")["ok"]


@pytest.mark.usefixtures("three_connections")
def test_a_client_waits_for_its_turn_where_all_connections_are_at_work(running, client, directory):
    engine = running.engine
    with raw_connection(directory) as one, raw_connection(directory) as two, raw_connection(directory) as three:
        for connection in (one, two, three):
            wire.send(connection, wire.encode({"id": 1, "do": "wait"}))
        until(lambda: engine.waiting == 3)
        with pytest.raises(TimeoutError):
            client.request("echo", timeout_s=0.2)
        one.close()
        assert client.request("echo", timeout_s=HANG_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away(start, public_directory):
    running = start(directory=public_directory)
    until(lambda: not nobody_listens(public_directory))
    os.chmod(public_directory / wire.SOCKET_NAME, 0o666)

    def as_somebody_else():
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(public_directory / wire.SOCKET_NAME))
            with contextlib.suppress(BrokenPipeError):
                wire.send(connection, wire.encode({"id": 1, "do": "hello", "arguments": {"version": "1"}}))
            return is_closed(connection)

    assert answer_of(as_somebody_else) == "True"
    assert not running.engine.hellos
    with raw_connection(public_directory) as connection:
        assert ask(connection, "echo")["ok"]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_long_request_holds_up_no_other(client, running):
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(client.request("wait")))
    waiter.start()
    until(lambda: running.engine.waiting)
    for _ in range(100):
        client.request("echo", timeout_s=HANG_S)
    assert not answers
    running.engine.release()
    waiter.join()
    assert answers == [{"pid": os.getpid()}]


def test_a_request_over_its_time_raises_and_ends_in_the_engine(client, running):
    with pytest.raises(TimeoutError, match=r"'wait' within 0\.1 s"):
        client.request("wait", timeout_s=0.1)
    until(lambda: not running.engine.waiting)
    assert client.request("echo")


def test_a_client_that_goes_away_ends_what_it_waits_for(running, directory):
    with raw_connection(directory) as connection:
        wire.send(connection, wire.encode({"id": 1, "do": "wait"}))
        until(lambda: running.engine.waiting)
        assert not running.engine.told_gone
    until(lambda: not running.engine.waiting)
    until(lambda: len(running.engine.told_gone) == 2)  # once during the wait, once after it returned
    assert running.engine.hellos[0][1].gone.is_set()


def test_an_idle_client_that_goes_away_is_told_of_once(running, directory):
    with raw_connection(directory):
        assert not running.engine.told_gone
    until(lambda: running.engine.told_gone)
    running.stop()
    assert running.engine.told_gone == [1]


# -- retiring ----------------------------------------------------------------------------------------------------------


def test_it_stays_while_there_is_a_client(start, directory):
    running = start(linger_s=0)
    until(lambda: wire.identity_of(directory))
    with raw_connection(directory):
        time.sleep(0.3)
        assert running.thread.is_alive()
    assert running.end() is True
    assert wire.identity_of(directory) is None
    assert not running.engine.running
    assert nobody_holds_the_lock(directory)


def test_it_stays_while_there_is_something_to_do(start, directory):
    engine = FakeEngine()
    engine.idle = False
    running = start(engine=engine, linger_s=0)
    until(lambda: wire.identity_of(directory))
    with raw_connection(directory):
        pass
    time.sleep(0.3)
    assert running.thread.is_alive()
    engine.idle = True
    assert running.end()


class LookedAt(ManualClock):
    """A clock that counts the looks at it: a service without a client looks several times a second."""

    looks = 0

    def monotonic(self):
        self.looks += 1
        return super().monotonic()

    def wait_for_looks(self):
        """Wait until a whole look has begun and ended."""
        seen = self.looks
        until(lambda: self.looks >= seen + 2)


def test_it_lingers_from_when_it_was_last_needed(start, directory):
    clock = LookedAt()
    running = start(linger_s=60, clock=clock)
    until(lambda: wire.identity_of(directory))
    with raw_connection(directory):
        clock.sleep(100)
        time.sleep(0.2)
    clock.wait_for_looks()
    clock.sleep(59)
    clock.wait_for_looks()
    assert running.thread.is_alive()
    clock.sleep(2)
    assert running.end()


def test_a_new_one_waits_for_its_first_client_even_without_a_linger(start, directory):
    clock = LookedAt()
    running = start(linger_s=0, clock=clock)
    until(lambda: wire.identity_of(directory))
    clock.wait_for_looks()
    assert running.thread.is_alive()
    clock.sleep(service_module.FIRST_CLIENT_S + 1)
    assert running.end()


def test_only_one_holds_the_lock(running, start, monkeypatch):
    monkeypatch.setattr(service_module, "ACQUIRE_S", 0.1)
    second = start()
    assert second.end() is False
    assert not second.engine.running
    assert running.engine.running


def test_a_brief_lock_test_does_not_stop_a_start(start, directory):
    lock = ExclusiveLock(directory / LOCK_NAME)
    lock.acquire()
    running = start()
    time.sleep(0.1)
    lock.release()
    until(lambda: running.engine.running)


def test_one_that_cannot_start_lets_go_of_the_lock(directory):
    engine = FakeEngine()
    engine.start = lambda: 1 / 0
    service = service_module.Service(engine, directory, version="1", linger_s=0)
    with pytest.raises(ZeroDivisionError):
        service.run()
    assert nobody_holds_the_lock(directory)
    assert wire.identity_of(directory) is None


def test_a_newer_client_may_have_it_retire(running, directory):
    with raw_connection(directory, greet=False) as connection:
        ask(connection, "hello", {"version": "1.0.1"})
        assert ask(connection, "retire") == {"id": 7, "ok": {}}
        assert is_closed(connection)
    assert running.end()


@pytest.mark.parametrize("version", ["1.0", "nonsense"])
def test_no_other_client_may_have_it_retire(running, directory, version):
    with raw_connection(directory, greet=False) as connection:
        assert ask(connection, "hello", {"version": version})["ok"] == {"greeting": "hello", "version": "1.0"}
        assert ask(connection, "retire")["error"]["kind"] == "invalid-input"
        assert ask(connection, "echo")["ok"]


def test_unfinished_work_is_left_to_the_next_flusher(running, directory):
    with raw_connection(directory) as connection:
        wire.send(connection, wire.encode({"id": 1, "do": "wait"}))
        until(lambda: running.engine.waiting)
        running.stop()
        assert wire.receive(connection) == {"id": 1, "ended": True}  # and not the engine's error
        assert is_closed(connection)


def test_the_lock_is_held_until_the_last_request_has_ended(running, directory):
    engine, finish = running.engine, threading.Event()

    def stubborn(arguments, peer):
        engine.waiting += 1
        finish.wait(HANG_S)
        return {"done": True}

    engine.do_stubborn = stubborn
    with raw_connection(directory) as connection:
        wire.send(connection, wire.encode({"id": 1, "do": "stubborn"}))
        until(lambda: engine.waiting)
        running.service.stop()
        until(lambda: wire.identity_of(directory) is None)
        assert not nobody_holds_the_lock(directory)
        assert not engine.closed
        finish.set()
        assert wire.receive(connection)["ok"] == {"done": True}
    assert running.end()
    assert engine.closed


def test_it_retires_where_its_socket_was_taken_away(running, directory):
    (directory / wire.SOCKET_NAME).unlink()
    assert running.end()


def test_a_socket_that_took_its_place_is_left_alone(running, directory):
    (directory / wire.SOCKET_NAME).unlink()
    (directory / wire.SOCKET_NAME).write_text("somebody's")
    assert running.end()
    assert (directory / wire.SOCKET_NAME).read_text() == "somebody's"


def test_a_forked_child_neither_listens_nor_keeps_connections_open(running, client, directory):
    client.request("echo")
    with idle_child():
        with raw_connection(directory) as connection:
            running.stop()
            connection.settimeout(HANG_S)
            assert is_closed(connection)
        assert nobody_listens(directory)
        assert nobody_holds_the_lock(directory)


def test_a_child_of_a_flusher_that_was_killed_leaves_no_socket_that_nobody_answers(directory):
    reading, writing = os.pipe()

    def flusher():
        os.close(writing)
        Running(directory)
        with raw_connection(directory):
            forked(lambda: os.read(reading, 1))
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(flusher) == signal.SIGKILL
    os.close(reading)
    try:
        assert wire.identity_of(directory)
        until(lambda: nobody_listens(directory))
        until(lambda: nobody_holds_the_lock(directory))  # the child closes socket and lock one after the other
    finally:
        os.close(writing)


def test_it_stops_when_told_not_when_it_next_looks_around(start, directory, monkeypatch):
    monkeypatch.setattr(service_module, "TICK_S", 60)
    monkeypatch.setattr(service_module, "TICK_BUSY_S", 60)
    running = start()
    with raw_connection(directory):
        time.sleep(0.05)
        running.service.stop()
        assert running.end()


def test_a_process_retires_by_itself_when_asked_by_a_signal(directory):
    launched = launcher(directory, linger_s=3600)()
    until(lambda: wire.identity_of(directory))
    os.kill(launched.pid, signal.SIGTERM)
    until(lambda: launched.status() is not None)
    assert launched.status() == 0
    assert wire.identity_of(directory) is None
    assert (directory / "history").read_text() == f"{launched.pid} served\n"
