"""The threads that move chunks are bounded, and never wait for themselves."""

import contextlib
import os
import signal
import threading
import time

import pytest

from tierfs.threads import Transfers


def test_no_more_buffers_are_on_their_way_than_there_are_threads():
    transfers = Transfers(workers=3)
    going, most = 0, 0
    lock, gate = threading.Lock(), threading.Event()

    def task(buffer):
        nonlocal going, most
        with lock:
            going += 1
            most = max(most, going)
        gate.wait(10)
        with lock:
            going -= 1

    sent = []

    def send_all():
        sent.extend(transfers.send(task, bytearray()) for _ in range(10))

    sender = threading.Thread(target=send_all)
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()  # the fourth transfer waits
    gate.set()
    sender.join(10)
    assert [future.result(10) for future in sent] == [None] * 10
    assert most == 3


def test_a_cancelled_task_gives_its_place_back():
    transfers = Transfers(workers=1)
    gate = threading.Event()
    running = transfers.send(lambda _: gate.wait(10), bytearray())
    assert not transfers._places.acquire(blocking=False)
    gate.set()
    assert running.result(10)
    assert transfers.send(lambda _: "next", bytearray()).result(10) == "next"


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
        assert gate.wait(10)
        ended.append(number)

    def interrupt():
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
    assert transfers.submit(lambda _: "later", None).result(10) == "later"
    assert sorted(begun) == [0, 1]


def test_an_interrupt_amid_handing_tasks_over_leaves_none_of_them_to_run(monkeypatch):
    transfers = Transfers(workers=1)
    gate, begun = threading.Event(), []
    held = transfers.submit(lambda _: gate.wait(10), None)
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
    assert held.result(10)
    transfers.submit(lambda _: None, None).result(10)
    assert begun == []
