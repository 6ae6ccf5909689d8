"""Threads wait for coroutines on another thread's loop. After return, no coroutine uses the lent buffers any more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from support.opened import descriptors
from support.waiting import HANG_S, until

from tierfs.objects.backends import loop_thread as module
from tierfs.objects.backends.loop_thread import LoopThread, body_reader


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.close()
    assert not loop._thread.is_alive()


def test_the_outcome_of_the_coroutine_is_returned_or_raised(loop: LoopThread) -> None:
    async def call() -> str:
        assert asyncio.get_running_loop() is loop._loop
        return "answer"

    async def fail() -> None:
        raise ZeroDivisionError("of the call")

    assert loop.run(call()) == "answer"
    with pytest.raises(ZeroDivisionError, match="of the call"):
        loop.run(fail())


def test_requests_of_many_threads_are_under_way_at_once(loop: LoopThread) -> None:
    barrier = asyncio.Barrier(50) if hasattr(asyncio, "Barrier") else None

    async def call(number: int) -> int:
        await (barrier.wait() if barrier else asyncio.sleep(0.001))
        return number

    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(lambda number: loop.run(call(number)), range(50))) == list(range(50))


class _Lent:
    """A call that uses a lent buffer until it is cancelled, and for a while longer."""

    def __init__(self) -> None:
        self.under_way = threading.Event()
        self.ended = False

    async def call(self) -> None:
        self.under_way.set()
        try:
            await asyncio.sleep(60)
        finally:
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            self.ended = True

    def interrupt(self, times: int) -> None:
        assert self.under_way.wait(HANG_S)
        for _ in range(times):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_waits_for_the_end_of_the_call(loop: LoopThread, times: int) -> None:
    lent = _Lent()
    interrupting = threading.Thread(target=lent.interrupt, args=(times,))
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(lent.call())
        assert lent.ended
    finally:
        interrupting.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the signal may hit a finalizer
def test_interrupts_at_any_moment_leave_nothing_under_way(loop: LoopThread) -> None:
    # SIGALRM interrupts the thread at a random point.
    random = Random(7)
    under_way = [0]

    class StruckError(Exception):
        pass

    def strike(*_: object) -> None:
        raise StruckError

    async def call() -> None:
        under_way[0] += 1
        try:
            await asyncio.sleep(0.002)
        finally:
            under_way[0] -= 1

    before = signal.signal(signal.SIGALRM, strike)
    loop.run(call())
    struck = 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.0025))
                loop.run(call())
                signal.setitimer(signal.ITIMER_REAL, 0)
            except StruckError:
                struck += 1
            assert under_way == [0], "the call went on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck > 50


def test_a_request_from_the_loop_is_refused_instead_of_waiting_for_itself(loop: LoopThread) -> None:
    async def inner() -> str:
        return "answer"

    async def outer() -> str:
        return loop.run(inner())

    with pytest.raises(RuntimeError, match="cannot wait"):
        loop.run(outer())
    assert loop.run(inner()) == "answer"


def test_an_error_keeps_nothing_of_the_call_without_the_collector(loop: LoopThread) -> None:
    class Lent(bytearray):
        pass

    def fail(lent: Lent) -> None:
        async def call() -> None:
            assert lent is not None
            raise FileNotFoundError

        with contextlib.suppress(FileNotFoundError):
            loop.run(call())

    gc.collect()
    gc.disable()
    try:
        lent = Lent(10)
        known = weakref.ref(lent)
        fail(lent)
        del lent
        until(lambda: known() is None)
    finally:
        gc.enable()


def test_a_loop_may_be_closed_on_its_own_thread() -> None:
    ran: list[str] = []

    async def last() -> None:
        ran.append("last")

    async def close() -> None:
        loop.close(last())

    loop = LoopThread("test")
    loop.run(close())
    loop._thread.join(HANG_S)
    assert ran == ["last"]


def test_a_close_that_fails_or_never_ends_holds_nobody_up() -> None:
    async def stuck() -> None:
        await asyncio.sleep(60)

    async def failing() -> None:
        raise OSError("no")

    for last in (stuck, failing):
        loop = LoopThread("test")
        began = time.monotonic()
        loop.close(last())
        assert time.monotonic() - began < 2 * module.CLOSE_S_MAX


def test_opening_again_and_again_leaks_neither_threads_nor_descriptors() -> None:
    async def call() -> None:
        pass

    def open_once() -> None:
        loop = LoopThread("test")
        loop.run(call())
        loop.close()

    def used() -> set[object]:
        return {*threading.enumerate(), *descriptors()}

    open_once()
    gc.collect()
    before = used()
    for _ in range(100):
        open_once()
    gc.collect()
    until(lambda: used() <= before)


def test_a_process_that_ends_with_requests_under_way_ends() -> None:
    program = """
import asyncio, threading
from tierfs.objects.backends.loop_thread import LoopThread
from tierfs.objects.backends.shared_session import SharedSession
class Session:
    endpoint = ""
    def __init__(self):
        self.loop = LoopThread("test")
    def close(self):
        self.loop.close(self.say())
    async def say(self):
        print("closed")
shared = SharedSession("test", Session)
begun = threading.Event()
async def work():
    begun.set()
    await asyncio.sleep(60)
threading.Thread(target=lambda: shared.get().loop.run(work()), daemon=True).start()
begun.wait()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert ran.stdout == "closed\n"


@pytest.mark.parametrize(("piece_bytes", "out_bytes"), [(7, 64), (1000, 10), (7, 1000)])
def test_buffers_are_filled_with_the_pieces_of_a_body(loop: LoopThread, piece_bytes: int, out_bytes: int) -> None:
    content = Random(3).randbytes(100)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), piece_bytes):
            yield content[at : at + piece_bytes]

    read_into = body_reader(loop, pieces())
    got, out = b"", memoryview(bytearray(out_bytes))
    while count := read_into(out):
        got += out[:count]
        assert count == out_bytes or len(got) == len(content)
    assert got == content
    assert read_into(out) == 0
