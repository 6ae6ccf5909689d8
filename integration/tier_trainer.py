"""One trainer process of `test_tier_faults`. Each argument after the URL and the options is a step.

Usage: python tier_trainer.py URL OPTIONS STEP..., OPTIONS in JSON. Each step prints its findings as a line of JSON.
Steps: save:NAME:NUMBER:BYTES[:ACK], read:NAME:NUMBER, wait:PREFIX:LEVEL:SECONDS, ack:NAME, status, evict:NAME:TIER,
kill, hard-exit, touch:FILE, await:FILE, fork:STEP (a child runs it and ends, and the trainer waits), patch-clock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time

import describing
import fsspec


def say(**words):
    print(json.dumps(words), flush=True)


class Trainer:
    def __init__(self, url, options):
        self.fs, self.root = fsspec.url_to_fs(url, **options)

    def path(self, name):
        return f"{self.root}/{name}" if name else self.root

    def do(self, step):
        kind, *rest = step.split(":")
        began = time.perf_counter()
        try:
            found = getattr(self, f"do_{kind.replace('-', '_')}")(*rest) or {}
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error)}
        say(step=step, took_s=round(time.perf_counter() - began, 3), **found)

    def do_save(self, name, number, length, ack=None):
        with self.fs.open(self.path(name), "wb", **({"ack": ack} if ack else {})) as file:
            file.write(describing.encode("trainer", int(number), int(length)))

    def do_read(self, name, number):
        (record,) = describing.decode(self.fs.cat_file(self.path(name)))
        assert record.number == int(number), record

    def do_wait(self, prefix, level, timeout):
        self.fs.wait(self.path(prefix), level, float(timeout))

    def do_ack(self, name):
        return {"ack": self.fs.ack(self.path(name))}

    def do_status(self):
        return {"status": self.fs.status(self.root)}

    def do_evict(self, name, tier):
        return {"evicted": self.fs.evict(self.path(name), tier)}

    def do_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_hard_exit(self):
        os._exit(0)

    def do_touch(self, file):
        with open(file, "wb"):
            pass

    def do_await(self, file):
        while not os.path.exists(file):
            time.sleep(0.01)

    def do_fork(self, *step):
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                self.do(":".join(step))
                status = 0
            os._exit(status)
        return {"child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}

    def do_patch_clock(self):
        """Make the wall clock go backwards from now on, an hour at a time."""
        real, start = time.time_ns, time.time_ns()
        jumps = iter(range(1, 1 << 60))
        time.time_ns = lambda: real() - next(jumps) * 3600 * 10**9
        time.time = lambda: time.time_ns() / 1e9
        assert time.time_ns() < start


def main():
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    url, options, *steps = sys.argv[1:]
    trainer = Trainer(url, json.loads(options))
    for step in steps:
        trainer.do(step)


if __name__ == "__main__":
    main()
