"""Run code in forked children. A child that hangs prints the stacks of its threads and ends."""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback

from support.waiting import HANG_S


def forked(work):
    """Run ``work`` in a forked child. Return its process id. Its exit status is 0, or 1 if ``work`` raised."""
    child = os.fork()
    if not child:
        status = 1
        try:
            # The alarm: no thread that a child of this child would lack.
            faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
            signal.alarm(int(HANG_S))
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def in_child(work):
    """Run ``work`` in a forked child. Return its wait status."""
    return os.waitpid(forked(work), 0)[1]


def answer_of(call):
    """Return the result of ``call`` in a forked child, as text; the traceback if it raised."""
    reading, writing = os.pipe()

    def work():
        try:
            os.write(writing, str(call()).encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())

    child = forked(work)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@contextlib.contextmanager
def idle_child():
    """Fork a child that does nothing, and ends with the block."""
    reading, writing = os.pipe()

    def work():
        os.close(writing)
        os.read(reading, 1)

    child = forked(work)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)
