"""An object tier that fails at random, and lies to some processes."""

import os
import pickle
import threading
import time
from pathlib import Path

from tierfs.clock import SystemClock
from tierfs.errors import NotFoundError, StoreError
from tierfs.format import keys
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.testing import Fault, FaultyObjects

FAULTS = [Fault.REFUSED] * 6 + [Fault.LOST_RESPONSE] * 6 + [Fault.BIT_FLIP, Fault.SLOW] * 3
FAULTS += [Fault.LATE, Fault.SHORT_READ] * 2 + [Fault.FULL, Fault.DENIED]
LIES = 0.3  # the probability of a lie
STALE_S = 2.0


class StruckObjects(WrappedObjects):
    """An object tier whose requests a fault strikes with a probability.

    If it lies, a listing of records may end early, as if it were whole. A read or a look may return what was there up
    to `STALE_S` ago.

    Each fault is noted as a byte at the end of a file of its kind: a process may be killed at any time.

    Args:
        inner: The tier.
        noise: Draws the faults.
        probability: That of a fault.
        notes: The directory of the notes.
        outage: While there is a file with this name, all requests fail.
        lies: Whether it lies.
    """

    def __init__(self, inner, noise, *, probability, notes, outage, lies):
        super().__init__(FaultyObjects(inner, seed=noise.randrange(1 << 30), clock=SystemClock()))
        self._noise, self._probability, self._notes, self._outage, self._lies = noise, probability, notes, outage, lies

    def _around(self, request, send):
        self._maybe_strike(request.method)
        if request.method == "delete" and request.key.startswith(keys.CHUNKS):
            self._note("../gc/deletions of chunks")
        past = Path(f"{self._notes}.past", request.key.replace("/", "|"))
        if request.method == "put" and not request.key.startswith(keys.CHUNKS):
            before = self._there(request.key)
            answer = send()
            part = past.with_name(f"{past.name}|{os.getpid()}")
            part.write_bytes(pickle.dumps(before))
            part.replace(past)
            return answer
        if self._lies and request.method in ("read", "head") and self._noise.random() < LIES and is_young(past):
            self._note("stale read")
            before = pickle.loads(past.read_bytes())
            if before is None:
                raise NotFoundError(f"{request.key} is not there yet", path=request.key)
            return before if request.method == "read" else before[1]
        return send()

    def _around_list(self, request, send):
        self._maybe_strike("list")
        if not (self._lies and request.key.startswith(keys.TREE)) or self._noise.random() >= LIES:
            return send()
        self._note("short listing")
        entries = sorted(send(), key=lambda entry: entry.key)  # as a server lists, which a directory need not
        return iter(entries[: len(entries) // 2])

    def _there(self, key):
        try:
            return self.inner.inner.read(key, 1 << 25)
        except NotFoundError:
            return None

    def _maybe_strike(self, method):
        if os.path.exists(self._outage):
            self._note("outage")
            raise StoreError("the object tier is away", transient=True, tier="object")
        if self._noise.random() >= self._probability:
            return
        fault = self._noise.choice([fault for fault in FAULTS if method in fault.methods])
        self.inner.inject(fault, method=method, seconds=self._noise.uniform(0.02, 0.4))
        self._note(fault.value)
        if fault is Fault.LATE:
            late = threading.Timer(self._noise.uniform(0.05, 1.5), self.inner.deliver_late)
            late.daemon = True
            late.start()

    def _note(self, kind):
        with open(f"{self._notes}/{kind}", "ab") as file:
            file.write(b".")


def is_young(path):
    try:
        return time.time() - path.stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False
