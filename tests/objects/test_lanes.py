"""Requests of many threads go to a few event loops, and what they lend is theirs again when they return."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from support.opened import descriptors

from tierfs.objects.backends import lanes as module
from tierfs.objects.backends.lanes import LOOPS_MAX, Lanes

REPOSITORY = Path(__file__).resolve().parents[2]


class Session:
    """Counts what is done with it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls = 0
        self.closed = 0

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.closed += 1


class Endpoint:
    """Opens sessions, and fails to as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.opened: list[Session] = []
        self.failures = failures
        self.attempts = 0

    async def connect(self) -> Session:
        self.attempts += 1
        number = self.attempts
        await asyncio.sleep(0.01)
        if number <= self.failures:
            raise OSError(f"attempt {number}")
        self.opened.append(Session())
        return self.opened[-1]


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


def _wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


def test_requests_of_many_threads_share_a_session_per_loop(endpoint: Endpoint) -> None:
    lanes = Lanes("test", endpoint.connect)
    start = threading.Barrier(50, timeout=60)

    async def call(session: Session) -> int:
        assert asyncio.get_running_loop() is session.loop
        session.calls += 1
        await asyncio.sleep(0.001)
        return session.calls

    def work(_: int) -> None:
        start.wait()
        for _ in range(20):
            lanes.run(call)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(work, range(50)))
    assert sum(session.calls for session in endpoint.opened) == 50 * 20
    assert len({session.loop for session in endpoint.opened}) == len(endpoint.opened) <= LOOPS_MAX
    assert len(endpoint.opened) == min(LOOPS_MAX, len(os.sched_getaffinity(0)))
    assert {each.under_way for each in module._loops._loops} == {0}


def test_what_the_call_raises_is_raised(endpoint: Endpoint) -> None:
    async def call(_: Session) -> None:
        raise ZeroDivisionError("of the call")

    with pytest.raises(ZeroDivisionError, match="of the call"):
        Lanes("test", endpoint.connect).run(call)


def test_a_connect_that_failed_is_tried_again_by_the_next_request() -> None:
    endpoint = Endpoint(failures=2)
    lanes = Lanes("test", endpoint.connect)

    async def call(_: Session) -> str:
        return "answer"

    for number in (1, 2):
        with pytest.raises(OSError, match=f"attempt {number}"):
            lanes.run(call)
    assert lanes.run(call) == "answer"
    assert lanes.run(call) == "answer"
    assert endpoint.attempts == 3


def test_requests_that_wait_for_one_connect_all_hear_that_it_failed() -> None:
    endpoint = Endpoint(failures=LOOPS_MAX)
    lanes = Lanes("test", endpoint.connect)

    async def call(_: Session) -> str:
        return "answer"

    def attempt(_: int) -> str:
        try:
            return lanes.run(call)
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        outcomes = set(pool.map(attempt, range(8)))
    assert outcomes <= {"answer", *(f"attempt {number}" for number in range(1, LOOPS_MAX + 1))}
    assert "attempt 1" in outcomes
    for _ in range(LOOPS_MAX):
        attempt(0)
    assert attempt(0) == "answer"


class _Lent:
    """A call that is busy with what it was lent until it is cancelled, and a while longer."""

    def __init__(self) -> None:
        self.under_way = threading.Event()
        self.ended = False

    async def call(self, _: Session) -> None:
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
        assert self.under_way.wait(30)
        for _ in range(times):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_waits_for_the_end_of_the_call(endpoint: Endpoint, times: int) -> None:
    lent = _Lent()
    interrupting = threading.Thread(target=lent.interrupt, args=(times,))
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Lanes("test", endpoint.connect).run(lent.call)
        assert lent.ended
    finally:
        interrupting.join()


def test_an_interrupt_takes_the_session_from_nobody_else(endpoint: Endpoint) -> None:
    connecting = threading.Event()

    async def connect() -> Session:
        connecting.set()
        await asyncio.sleep(0.3)
        return await endpoint.connect()

    async def call(session: Session) -> Session:
        return session

    def interrupt() -> None:
        assert connecting.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    lanes = Lanes("test", connect)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(call)
    finally:
        interrupting.join()
    assert lanes.run(call) is endpoint.opened[0]


def test_an_interrupt_before_the_call_is_begun_leaves_nothing_under_way(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    start = module._Call.start

    async def call(_: Session) -> None:
        begun.append(True)

    def interrupted(starting: module._Call[None]) -> None:
        if starting._coroutine.__name__ == "_work":  # and no session's closing
            raise KeyboardInterrupt
        start(starting)

    monkeypatch.setattr(module._Call, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lanes("test", endpoint.connect).run(call)
    assert not begun


def test_an_interrupt_right_after_the_call_is_begun_waits_for_its_end(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = _Lent()
    start = module._Call.start

    def interrupted(starting: module._Call[None]) -> None:
        start(starting)
        if starting._coroutine.__name__ == "_work":
            assert lent.under_way.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Call, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lanes("test", endpoint.connect).run(lent.call)
    assert lent.ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a finalizer may be what is struck
def test_interrupts_at_any_moment_leave_nothing_under_way(endpoint: Endpoint) -> None:
    """SIGALRM strikes wherever the thread is just then."""
    random = Random(7)
    lanes = Lanes("test", endpoint.connect)
    under_way = [0]

    class StruckError(Exception):
        pass

    def strike(*_: object) -> None:
        raise StruckError

    async def call(_: Session) -> None:
        under_way[0] += 1
        try:
            await asyncio.sleep(0.002)
        finally:
            under_way[0] -= 1

    before = signal.signal(signal.SIGALRM, strike)
    lanes.run(call)
    struck = 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.0025))
                lanes.run(call)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except StruckError:
                struck += 1
            assert under_way == [0], "the call went on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck > 50


def test_a_request_from_one_of_the_loops_is_refused_instead_of_waiting_for_itself(endpoint: Endpoint) -> None:
    lanes = Lanes("test", endpoint.connect)

    async def inner(_: Session) -> str:
        return "answer"

    async def outer(_: Session) -> str:
        return lanes.run(inner)

    with pytest.raises(RuntimeError, match="cannot wait"):
        lanes.run(outer)
    assert lanes.run(inner) == "answer"


def test_a_request_from_another_loop_is_answered(endpoint: Endpoint) -> None:
    async def call(_: Session) -> str:
        return "answer"

    async def outer() -> str:
        return Lanes("test", endpoint.connect).run(call)

    assert asyncio.run(outer()) == "answer"


def test_an_error_keeps_nothing_of_the_call_without_the_collector(endpoint: Endpoint) -> None:
    class Lent(bytearray):
        pass

    def fail(lent: Lent) -> None:
        async def call(_: Session) -> None:
            assert lent is not None
            raise FileNotFoundError

        with contextlib.suppress(FileNotFoundError):
            lanes.run(call)

    lanes = Lanes("test", endpoint.connect)
    gc.collect()
    gc.disable()
    try:
        lent = Lent(10)
        known = weakref.ref(lent)
        fail(lent)
        del lent
        _wait_until(lambda: known() is None)
    finally:
        gc.enable()


def test_sessions_are_closed_when_their_lanes_are_dropped(endpoint: Endpoint) -> None:
    async def call(_: Session) -> None:
        await asyncio.sleep(0.01)

    lanes = Lanes("test", endpoint.connect)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lanes.run, [call] * 8))
    assert not any(session.closed for session in endpoint.opened)
    del lanes
    gc.collect()
    _wait_until(lambda: all(session.closed == 1 for session in endpoint.opened))


def test_lanes_may_be_dropped_on_a_loop(endpoint: Endpoint) -> None:
    async def call(_: Session) -> None:
        pass

    async def drop(_: Session) -> None:
        dropped.pop()
        gc.collect()

    dropped = [Lanes("test", endpoint.connect)]
    dropped[0].run(call)
    Lanes("other", Endpoint().connect).run(drop)
    _wait_until(lambda: endpoint.opened[0].closed == 1)


def test_a_session_whose_close_fails_or_never_ends_holds_nobody_up(endpoint: Endpoint) -> None:
    class Stuck(Session):
        async def close(self) -> None:
            await asyncio.sleep(60)

    class Failing(Session):
        async def close(self) -> None:
            raise OSError("no")

    for kind in (Stuck, Failing):

        async def connect(kind: type[Session] = kind) -> Session:
            return kind()

        async def call(_: Session) -> str:
            return "answer"

        lanes = Lanes("test", connect)
        assert lanes.run(call) == "answer"
        began = time.monotonic()
        del lanes
        gc.collect()
        assert time.monotonic() - began < 2 * module.CLOSE_S_MAX


def test_opening_again_and_again_leaks_neither_threads_nor_descriptors(endpoint: Endpoint) -> None:
    class WithSocket(Session):
        def __init__(self) -> None:
            super().__init__()
            self.ends = socket.socketpair()

        async def close(self) -> None:
            for end in self.ends:
                end.close()

    async def connect() -> Session:
        return WithSocket()

    async def call(_: Session) -> None:
        pass

    def open_once() -> None:
        Lanes("test", connect).run(call)

    def used() -> set[object]:
        return {*threading.enumerate(), *descriptors()}

    open_once()
    gc.collect()
    before = used()
    for _ in range(100):
        open_once()
    gc.collect()
    _wait_until(lambda: used() <= before)


def _run(program: str, seconds: float = 60, early: str = "") -> str:
    """What a process of its own says; it warns of nothing and leaves nothing."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore:.*multi-threaded:DeprecationWarning", "-c"]
    ran = subprocess.run(
        [*command, "".join(textwrap.dedent(part) for part in (early, PREAMBLE, program))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    # asyncio's debug mode reports what a busy machine delayed.
    said = re.sub(r"^Executing .* took [0-9.]+ seconds\n", "", ran.stderr, flags=re.MULTILINE)
    assert (ran.returncode, said) == (0, ""), ran.stderr
    return ran.stdout


PREAMBLE = """
    import asyncio, atexit, gc, os, sys, threading, time, weakref
    from tierfs.objects.backends.lanes import Lanes

    def say(*what):
        os.write(1, (" ".join(map(str, what)) + "\\n").encode())

    class Session:
        def __init__(self):
            self.pid = os.getpid()
            self.is_open = True
        async def close(self):
            say("closed by", "owner" if os.getpid() == self.pid else "another")
            self.is_open = False
        def __del__(self, write=os.write, getpid=os.getpid):  # nothing else is left when the interpreter ends
            if self.is_open and getpid() != self.pid:
                write(1, b"collected by another\\n")

    async def connect():
        return Session()

    async def call(session):
        assert session.is_open and session.pid == os.getpid(), "a session of somebody else"
        await asyncio.sleep(0.001)
        return "answer"

    lanes = Lanes("test", connect)
"""


def test_sessions_are_closed_when_the_process_ends() -> None:
    assert _run("lanes.run(call)") == "closed by owner\n"


def test_a_process_that_ends_with_requests_under_way_ends() -> None:
    program = """
        async def long(session):
            await asyncio.sleep(60)
        threading.Thread(target=lanes.run, args=(long,), daemon=True).start()
        time.sleep(0.3)
    """
    assert _run(program, 20) == "closed by owner\n"


def test_a_request_after_the_sessions_were_closed_opens_another_one() -> None:
    """What was registered for the end of the process before anything of ours comes after our own."""
    program = """
        lanes.run(call)
    """
    early = """
        import atexit
        def save():
            say(lanes.run(call))
        atexit.register(save)
    """
    said = _run(program, early=early).splitlines()
    assert said[:2] == ["closed by owner", "answer"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_opens_sessions_of_its_own_and_leaves_those_of_its_parent(busy: bool) -> None:
    program = f"""
        over = False
        def work():
            while not over:
                lanes.run(call)
        threads = [threading.Thread(target=work) for _ in range(8 * {busy})]
        for thread in threads:
            thread.start()
        assert lanes.run(call) == "answer"
        for _ in range(5):
            time.sleep(0.05)
            pid = os.fork()
            if not pid:
                for _ in range(20):
                    assert lanes.run(call) == "answer"
                gc.collect()
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert lanes.run(call) == "answer"
        over = True
        for thread in threads:
            thread.join()
        say("parent ends")
    """
    said = _run(program).splitlines()
    assert set(said) == {"closed by owner", "parent ends"}
    of_children = said.index("parent ends")
    assert of_children >= 5
    assert len(said) > of_children + 1, "the parent closed nothing"


def test_a_child_that_drops_what_it_inherited_closes_nothing() -> None:
    program = """
        lanes.run(call)
        pid = os.fork()
        if not pid:
            del lanes
            gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        say("parent ends")
    """
    assert _run(program) == "parent ends\nclosed by owner\n"
