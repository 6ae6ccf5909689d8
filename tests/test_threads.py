"""The threads of a process do each task once, are bounded in number, and never wait for themselves."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import HANG_S, until

from tierfs.threads import Processors, Transfers


@pytest.fixture(autouse=True)
def three_processors(with_processors):
    with_processors(3)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_everything_is_done_once_here_and_elsewhere(count):
    done, threads = [], set()

    def task(number):
        done.append(number)
        threads.add(threading.get_ident())
        time.sleep(0.002)

    Processors(threads_max=2).share_out(task, range(count))
    assert sorted(done) == list(range(count))
    assert len(threads) <= 2
    # With two tasks the other thread may do both while this thread is delayed.
    assert threading.get_ident() in threads or count in {0, 2}


def test_one_thing_is_done_here():
    processors, threads = Processors(), []
    processors.share_out(lambda _: threads.append(threading.get_ident()), [1])
    assert threads == [threading.get_ident()]


def test_many_calls_at_once_have_no_more_helpers_than_other_processors():
    processors, lock = Processors(), threading.Lock()
    going, most, helpers = 0, 0, set()

    def task(_):
        nonlocal going, most
        name = threading.current_thread().name
        with lock:
            going += 1
            most = max(most, going)
            if name.startswith("tierfs-share"):
                helpers.add(name)
        time.sleep(0.001)
        with lock:
            going -= 1

    with ThreadPoolExecutor(6) as callers:
        list(callers.map(lambda _: processors.share_out(task, range(20)), range(30)))
    assert most <= 6 + 2
    assert "busy=0" in repr(processors)
    processors.share_out(task, range(20))
    assert helpers


@pytest.mark.parametrize("threads_max", [1, 2, 3])
def test_calls_within_calls_come_to_an_end(threads_max):
    processors, done = Processors(threads_max=threads_max), []

    def share(depth):
        if depth:
            processors.share_out(share, [depth - 1] * 3)
        else:
            done.append(1)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(share, [4] * 8, timeout=HANG_S))
    assert len(done) == 8 * 3**4


def test_a_busy_helper_is_not_waited_for():
    processors, gate, done = Processors(threads_max=2), threading.Event(), []
    busy = [processors._threads().submit(gate.wait, 10) for _ in range(2)]
    processors.share_out(done.append, range(5))
    assert done == list(range(5))
    gate.set()
    assert [future.result(HANG_S) for future in busy] == [True, True]


def test_the_error_of_the_first_in_order_is_raised_whoever_failed_first():
    failed = threading.Event()

    def task(number):
        if number == 1:
            failed.set()
            raise ValueError(number)
        assert failed.wait(HANG_S)
        raise IndexError(number)

    with pytest.raises(IndexError, match="0"):
        Processors().share_out(task, range(2))


def test_an_error_is_raised_when_all_that_was_begun_has_ended():
    here, started, begun, ended = threading.get_ident(), threading.Event(), [], []

    def task(number):
        if threading.get_ident() != here:
            begun.append(number)
            started.set()
            time.sleep(0.05)
            ended.append(number)
            return
        assert started.wait(HANG_S)
        raise IndexError("here")

    with pytest.raises(IndexError, match="here"):
        Processors(threads_max=2).share_out(task, range(100))
    assert 0 < len(begun) < 99
    assert begun == ended


def test_an_interrupt_waits_for_what_was_begun_and_comes_before_errors():
    here, started, ended = threading.get_ident(), threading.Event(), []
    processors = Processors(threads_max=2)

    def task(_):
        if threading.get_ident() == here:
            assert started.wait(HANG_S)
            raise KeyboardInterrupt
        started.set()
        time.sleep(0.05)
        ended.append(1)
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        processors.share_out(task, range(100))
    assert ended == [1]
    assert "busy=0" in repr(processors)


def test_helpers_keep_no_reference_to_a_callers_memory():
    processors = Processors()

    def fill(buffer, fails_at=None):
        view = memoryview(buffer)

        def task(number):
            view[number] = 1
            if number == fails_at:
                raise ValueError(number)

        processors.share_out(task, range(len(buffer)))

    gc.disable()
    try:
        for _ in range(200):
            buffer = bytearray(20)
            fill(buffer)
            assert all(buffer)
            buffer.append(1)  # raises BufferError while a view of the buffer exists
            with pytest.raises(ValueError, match="7"):
                fill(buffer, fails_at=7)
            buffer.append(1)
    finally:
        gc.enable()


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    done = []
    Processors().share_out(done.append, range(5))
    assert done == list(range(5))


def test_no_more_threads_have_a_turn_than_there_are_processors(with_processors):
    with_processors(2)
    shared, lock, inside, most = Processors(), threading.Lock(), [], []
    pairs = threading.Barrier(2)

    def work():
        with shared.turn():
            with lock:
                inside.append(1)
                most.append(len(inside))
            pairs.wait(HANG_S)
            shared.share_out(lambda _: time.sleep(0.005), range(4))
            with lock:
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (8, 2)


def test_a_forked_child_has_helpers_of_its_own():
    code = """
import os, threading, time
from tierfs.threads import processors
os.sched_getaffinity = lambda _: {0, 1, 2}
def threads():
    found = set()
    def task(_):
        found.add(threading.get_ident())
        time.sleep(0.01)
    processors().share_out(task, range(20))
    return len(found)
assert threads() == 3
child = os.fork()
if not child:
    os._exit(threads())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert threads() == 3
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=HANG_S, env=dict(os.environ))


def test_the_end_of_the_interpreter_is_no_error():
    code = """
import atexit, os
from tierfs.threads import processors
os.sched_getaffinity = lambda _: {0, 1, 2}
done = []
processors().share_out(done.append, range(9))
@atexit.register
def late():
    processors().share_out(done.append, range(9))
    print(len(done))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("18\n", "")


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_no_more_buffers_are_on_their_way_than_there_are_threads():
    transfers = Transfers(workers=3)
    going, most = 0, 0
    lock, gate = threading.Lock(), threading.Event()

    def task(buffer):
        nonlocal going, most
        with lock:
            going += 1
            most = max(most, going)
        gate.wait(HANG_S)
        with lock:
            going -= 1

    sent = []

    def send_all():
        sent.extend(transfers.send(task, bytearray()) for _ in range(10))

    sender = threading.Thread(target=send_all)
    sender.start()
    until(lambda: going == 3)
    sender.join(0.2)
    assert sender.is_alive()  # the fourth transfer waits
    gate.set()
    sender.join(HANG_S)
    assert [future.result(HANG_S) for future in sent] == [None] * 10
    assert most == 3


def test_a_cancelled_task_gives_its_place_back():
    transfers = Transfers(workers=1)
    gate = threading.Event()
    running = transfers.send(lambda _: gate.wait(HANG_S), bytearray())
    assert not transfers._places.acquire(blocking=False)
    gate.set()
    assert running.result(HANG_S)
    assert transfers.send(lambda _: "next", bytearray()).result(HANG_S) == "next"


def test_every_task_ends_before_the_first_error_is_raised():
    transfers = Transfers(workers=2)
    done = []

    def task(number):
        if number == 0:
            raise ValueError("first")
        done.append(number)

    with pytest.raises(ValueError, match="first"):
        transfers.map(task, range(20))
    assert sorted(done) == list(range(1, 20))


def test_an_interrupt_waits_for_what_has_begun_and_lets_nothing_else_begin():
    transfers = Transfers(workers=2)
    gate, begun, ended = threading.Event(), [], []

    def task(number):
        begun.append(number)
        assert gate.wait(HANG_S)
        ended.append(number)

    def interrupt():
        until(lambda: len(begun) == 2)
        for _ in range(3):  # repeated interrupts do not cut the wait short
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        gate.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            transfers.map(task, range(20))
        finally:
            ended_by_then = sorted(ended)
            while not gate.is_set():  # the interrupts must not hit later code
                with contextlib.suppress(KeyboardInterrupt):
                    gate.wait()
    thread.join()
    assert ended_by_then == sorted(begun) == [0, 1]
    assert transfers.submit(lambda _: "later", None).result(HANG_S) == "later"
    assert sorted(begun) == [0, 1]


def test_an_interrupt_amid_handing_tasks_over_leaves_none_of_them_to_run(monkeypatch):
    transfers = Transfers(workers=1)
    gate, begun = threading.Event(), []
    held = transfers.submit(lambda _: gate.wait(HANG_S), None)
    submit, handed_over = transfers._executor.submit, []

    def interrupted(run):
        submit(run)
        handed_over.append(run)
        if len(handed_over) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(transfers._executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfers.map(begun.append, range(3))
    monkeypatch.undo()
    gate.set()
    assert held.result(HANG_S)
    transfers.submit(lambda _: None, None).result(HANG_S)
    assert begun == []
