"""Wait for other threads and processes. A limit here only ends a test that hangs: a busy machine may take its time."""

import time

HANG_S = 200.0


def until(condition, *, every_s=0.005):
    """Call ``condition`` until it returns something true, and return that."""
    found = within(HANG_S, condition, every_s=every_s)
    assert found, f"not within {HANG_S} s"
    return found


def within(seconds, condition, *, every_s=0.005):
    """Call ``condition`` until it returns something true or the time is up, and return its last answer."""
    ends = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < ends:
        time.sleep(every_s)
    return found
