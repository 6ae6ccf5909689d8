"""A flusher without tiers: its engine answers, waits, fails and dies on request.

Also a program: ``fake_flusher.py DIRECTORY VERSION LINGER_S``.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

from tierfs.errors import CapacityError, InvalidInputError, NotFoundError
from tierfs.flusher.server import Service
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.rpc.launch import LOG_NAME, spawn
from tierfs.host.rpc.protocol import LOCK_NAME


class FakeEngine:
    def __init__(self, directory=None):
        self.directory = directory
        self.condition = threading.Condition()
        self.idle = True
        self.running = False
        self.asked = []
        self.told_gone = []
        self.hellos = []
        self.waiting = 0
        self.released = False
        self.closed = False

    def start(self):
        self.running = True

    def stop(self):
        with self.condition:
            self.running = False
            self.condition.notify_all()

    def close(self):
        self.closed = True

    def release(self):
        with self.condition:
            self.released = True
            self.condition.notify_all()

    def is_idle(self):
        return self.idle

    def gone(self, peer):
        with self.condition:
            self.told_gone.append(peer.number)
            self.condition.notify_all()

    def handle(self, do, arguments, peer):
        if not self.running:
            raise InvalidInputError("this flusher has ended")
        if do == "hello":
            self.hellos.append((arguments, peer))
            return {"greeting": "hello"}
        self.asked.append(do)
        return getattr(self, f"do_{do}", self.unknown)(arguments, peer)

    def unknown(self, arguments, peer):
        raise InvalidInputError("what is that?")

    def do_echo(self, arguments, peer):
        return {**arguments, "pid": os.getpid(), "peer": peer.pid}

    def do_wait(self, arguments, peer):
        with self.condition:
            self.waiting += 1
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.released or peer.gone.is_set() or not self.running)
            self.waiting -= 1
            self.condition.notify_all()
        if not self.running:
            raise NotFoundError("never mind")
        return {"pid": os.getpid()}

    def do_full(self, arguments, peer):
        raise CapacityError("all is dirty", path="a/b", tier="nvme")

    def do_late(self, arguments, peer):
        raise TimeoutError("not in time")

    def do_bug(self, arguments, peer):
        return {"answer": 1 / 0}

    def do_large(self, arguments, peer):
        return {"answer": "x" * 100_000}

    def do_die_once(self, arguments, peer):
        """Kill this process during the request, unless an earlier one was killed."""
        try:
            os.close(os.open(self.directory / "died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return {"pid": os.getpid()}
        return self.do_die(arguments, peer)

    def do_die(self, arguments, peer):
        os.kill(os.getpid(), signal.SIGKILL)


class Running:
    """A service that runs on a thread."""

    def __init__(self, directory, *, engine=None, version="1.0", linger_s=3600.0, clock=None, **more):
        self.engine = engine or FakeEngine()
        self.service = Service(self.engine, directory, version=version, linger_s=linger_s, clock=clock, **more)
        self.outcome = []
        self.thread = threading.Thread(target=lambda: self.outcome.append(self.service.run()))
        self.thread.start()

    def stop(self):
        self.service.stop()
        self.thread.join()

    def status(self):
        """See `Launched.status`."""
        return None if self.thread.is_alive() else 0

    def end(self):
        self.thread.join()
        return self.outcome[0]


def nobody_holds_the_lock(directory):
    lock = ExclusiveLock(directory / LOCK_NAME)
    taken = lock.acquire()
    lock.release()
    return taken


def connections(client):
    """Return how many connections a client has, idle ones included."""
    return int(re.search(r"(\d+) connections", repr(client))[1])


def launcher(directory, version="1.0", linger_s=0.0):
    """Return a function that starts this file as a process."""
    argv = [sys.executable, __file__, str(directory), version, str(linger_s)]
    return lambda: spawn(argv, directory / LOG_NAME)


def process_client(directory, version="1.0", linger_s=0.0, **more):
    return FlusherClient(directory, launcher(directory, version, linger_s), version, dict, **more)


def main():
    directory, version, linger_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    service = Service(FakeEngine(directory), directory, version=version, linger_s=linger_s)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    had_the_lock = service.run()
    with open(directory / "history", "a") as file:
        file.write(f"{os.getpid()} {'served' if had_the_lock else 'too late'}\n")


if __name__ == "__main__":
    main()
