"""A session that many threads share, and children do not."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tierfs.objects.backends.direct import Direct


class Session:
    """Notes where it was used."""

    def __init__(self) -> None:
        self.opened_by = os.getpid()
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def thread_of(session: Session) -> tuple[Session, int]:
    return session, threading.get_ident()


def test_calls_run_on_their_own_threads_with_one_session() -> None:
    direct = Direct("test", Session)
    barrier = threading.Barrier(8)

    def call(_: int) -> tuple[Session, int, int]:
        barrier.wait(10)
        session, ran_on = direct.run(thread_of)
        return session, ran_on, threading.get_ident()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, range(8)))
    assert len({id(session) for session, _, _ in answers}) == 1
    assert all(ran_on == here for _, ran_on, here in answers)


def test_a_session_that_could_not_be_opened_is_opened_by_the_next_call() -> None:
    attempts: list[int] = []

    def connect() -> Session:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return Session()

    direct = Direct("test", connect)
    with pytest.raises(OSError, match="not yet"):
        direct.run(thread_of)
    assert direct.run(thread_of)[1] == threading.get_ident()


def test_errors_are_raised_as_they_are_and_the_others_still_run() -> None:
    ran: list[int] = []

    async def one(number: int) -> int:
        ran.append(number)
        if number == 1:
            raise KeyError(number)
        return number

    direct = Direct("test", Session)
    outcomes = direct.run(lambda _: direct.together([one(number) for number in range(3)]))
    assert [type(outcome) for outcome in outcomes] == [int, KeyError, int]
    assert ran == [0, 1, 2]
    with pytest.raises(KeyError):
        direct.run(lambda _: one(1))


def test_an_interrupt_leaves_no_call_begun() -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    direct = Direct("test", Session)
    with pytest.raises(KeyboardInterrupt):
        direct.run(lambda _: direct.together([interrupted(), interrupted()]))
    gc.collect()  # where a coroutine that was never awaited would be told of, as an error


def test_a_call_that_needs_a_loop_is_refused() -> None:
    import asyncio

    direct = Direct("test", Session)
    with pytest.raises((RuntimeError, AssertionError)):
        direct.run(lambda _: asyncio.sleep(1))


def test_the_session_is_closed_when_nobody_has_it_any_more() -> None:
    direct = Direct("test", Session)
    session, _ = direct.run(thread_of)
    del direct
    gc.collect()
    assert session.closed


def test_a_child_opens_its_own_and_leaves_its_parents_alone() -> None:
    direct = Direct("test", Session)
    session, _ = direct.run(thread_of)
    child = os.fork()
    if not child:
        own, _ = direct.run(thread_of)
        del direct
        gc.collect()
        os._exit(0 if own.opened_by == os.getpid() and own.closed and not session.closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert direct.run(thread_of)[0] is session
