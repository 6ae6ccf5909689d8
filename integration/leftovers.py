"""Find and stop flushers that tests leave behind, by the state directory that they serve."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 10


def flushers(directory):
    """Return the process ids of flushers whose state directory is this directory or below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                if b"flusher" in argv and any(os.fsencode(directory) in word for word in argv):
                    found.append(int(entry.name))
    return found


def end_flushers(directory):
    """Stop them, after the steps in progress if possible. Pending files for a server that is gone stay pending."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in flushers(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ends = time.monotonic() + PATIENCE_S
        while flushers(directory) and time.monotonic() < ends:
            time.sleep(0.02)
