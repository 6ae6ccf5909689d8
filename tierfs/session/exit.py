"""At process exit, wait for pending changes for a bounded time, and log the files that are left.

If a save still runs on another thread that the interpreter waits for, the save ends before the tiers are closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shlex
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from tierfs.errors import TierfsError
from tierfs.host.pending.levels import Level
from tierfs.store.leases import release_leases

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers

# A flusher process outlives this process; a flusher thread does not.
WAIT_S = 2.0
WAIT_FOR_THREAD_S = 60.0
NAMED_MAX = 5
_logger = logging.getLogger("tierfs.store")


def finish(tiers: Tiers, url: str) -> None:
    """Wait for pending changes, and log those that are left."""
    ends = tiers.flusher.ends_with_us
    if not _pending(tiers, ends=ends):
        return
    reason = ""
    try:
        # `_wait_for_threads` has already waited for a flusher thread, which gets nothing more done now.
        tiers.wait("", Level.OBJECT, 0 if ends else WAIT_S)
    except TimeoutError:
        pass
    except TierfsError as error:
        reason = f" ({error})"
    pending = _pending(tiers, ends=ends)
    if not pending:
        return
    named = ", ".join(sorted(pending)[:NAMED_MAX]) + (", ..." if len(pending) > NAMED_MAX else "")
    if ends:
        after = "they are flushed when the store is next opened on this host, unless the host reboots first"
    elif tiers.flusher.is_running():
        after = f"the flusher continues; `tierfs wait {shlex.quote(url)}` waits for it"
    else:
        after = "no flusher runs; one is started when the store is next opened on this host"
    _logger.warning("%d files are not in %s yet%s: %s; %s", len(pending), url, reason, named, after)


def _pending(tiers: Tiers, *, ends: bool) -> list[str]:
    return list(tiers.drafts.pending_below("")) if ends else [draft.path for draft in tiers.drafts.own()]


def finish_at_exit(tiers: Tiers, url: str) -> None:
    """Call `finish` when this process ends, unless it is a forked child or the tiers are no longer used.

    The tiers are held by a weak reference.
    """
    _open[tiers] = url, os.getpid()
    _register(os.getpid())


# By tiers, which only their users keep alive, the store's root and the process that opened them.
_open: weakref.WeakKeyDictionary[Tiers, tuple[str, int]] = weakref.WeakKeyDictionary()


@functools.cache
def _register(_process: int) -> None:
    # Called when all threads that the interpreter waits for have ended, and their saves with them.
    atexit.register(_close_all)
    # An exiting interpreter accepts no more callbacks. The next process that opens the store finds sealed drafts.
    with contextlib.suppress(RuntimeError):
        # Called while executors still accept work; by the time of `atexit` they do not.
        getattr(threading, "_register_atexit", atexit.register)(_wait_for_threads)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415 - only a child has it loaded

        # `multiprocessing` ends a child without running `atexit` callbacks. This one runs after the child's other
        # finalizers.
        Finalize(None, _close_in_child, exitpriority=-1)


def _wait_for_threads() -> None:
    """Wait for flushers that are threads of this process, which need executors to finish."""
    for tiers in _opened():
        # `finish` logs how many files are left, and why.
        with contextlib.suppress(TierfsError, OSError):
            if tiers.flusher.ends_with_us and tiers.drafts.pending_below(""):
                tiers.wait("", Level.OBJECT, WAIT_FOR_THREAD_S)


def _close_in_child() -> None:
    """Close the tiers in a process that `multiprocessing` started.

    If another thread that the interpreter waits for is not tierfs's, it may be saving. Then nothing is closed, as if
    the process were killed after that thread's end.
    """
    known = (threading.current_thread(), threading.main_thread())
    if all(thread.daemon or thread in known or thread.name.startswith("tierfs-") for thread in threading.enumerate()):
        _close_all()
        release_leases()


def _close_all() -> None:
    for tiers in _opened():
        url = _open.pop(tiers)[0]
        # If the state directory is gone, nothing is left to close.
        if tiers.ram.host.directory.exists():
            try:
                finish(tiers, url)
                tiers.close()
            except (TierfsError, OSError) as error:
                # No data is lost: the next process that opens the store finds sealed drafts.
                _logger.warning("the local tiers of %s were not closed cleanly: %s", url, error)


def _opened() -> list[Tiers]:
    """Return the tiers that this process opened itself, not a parent, and still uses; the newest first."""
    return [tiers for tiers, (_, process) in reversed(list(_open.items())) if process == os.getpid()]
