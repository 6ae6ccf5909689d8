"""Rests between the lines of tests and in tierfs' own threads, as a busy machine makes them: they find races.

With ``TIERFS_TEST_RESTS=SEED`` each test draws whether the thread that runs it, tierfs' threads, or both rest. The main
thread rests between lines of functions in test files, for 0.8 s in all. A thread whose name begins with ``tierfs`` rests
before it begins, and sometimes when a wait of it for a condition ends.
"""

import contextlib
import os
import random
import sys
import threading
import time
import zlib

VARIABLE = "TIERFS_TEST_RESTS"
MAIN_S = 0.8
_LINE_S = (0, 0, 0.001, 0.01, 0.03, 0.08)
_BEGIN_S = (0, 0.02, 0.1, 0.2)
_WAKE_S = (0.005, 0.03)
_WAKES = 0.1
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SUPPORT = os.path.dirname(__file__) + os.sep


class Rests:
    def __init__(self, seed):
        self._seed = seed
        self._draw = self._draw_threads = random.Random(seed)
        self._left_s = 0.0
        self._threads_rest = False

    def install(self):
        """Let tierfs' threads rest while a test of `during` says so."""
        run, wait = threading.Thread.run, threading.Condition.wait

        def run_later(thread):
            if self._threads_rest and thread.name.startswith("tierfs"):
                time.sleep(self._draw_threads.choice(_BEGIN_S))
            run(thread)

        def wait_longer(condition, timeout=None):
            found = wait(condition, timeout)
            is_own = threading.current_thread().name.startswith("tierfs")
            if self._threads_rest and is_own and self._draw_threads.random() < _WAKES:
                condition.release()
                time.sleep(self._draw_threads.choice(_WAKE_S))
                condition.acquire()
            return found

        threading.Thread.run, threading.Condition.wait = run_later, wait_longer

    @contextlib.contextmanager
    def during(self, name):
        """Rest in the way that a test draws by its name."""
        self._draw = random.Random(zlib.crc32(f"{self._seed} {name}".encode()))
        who = self._draw.choice(("main", "threads", "both"))
        self._left_s = MAIN_S if who != "threads" else 0.0
        self._threads_rest = who != "main"
        before = sys.gettrace()
        if self._left_s:
            sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._threads_rest = False

    def _call(self, frame, event, argument):
        name = frame.f_code.co_filename
        return self._line if self._left_s > 0 and name.startswith(_HERE) and not name.startswith(_SUPPORT) else None

    def _line(self, frame, event, argument):
        if event == "line" and self._left_s > 0:
            rest_s = self._draw.choice(_LINE_S)
            self._left_s -= rest_s
            time.sleep(rest_s)
        return self._line if self._left_s > 0 else None


def rests_of(environment):
    """Return the rests that an environment asks for; ``None`` if it asks for none."""
    seed = environment.get(VARIABLE)
    return None if not seed else Rests(seed)
