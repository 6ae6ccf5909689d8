"""What moves chunks has bounds, and never waits for itself."""

import threading

import pytest

from tierfs.store.transfers import Transfers


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
    assert sender.is_alive()  # the fourth waits
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
