"""At the end of a process: a bounded wait for what it has pending, then a word on what is left and who goes on with it.

A save that runs on another thread then, which the interpreter waits for, comes to its end before the tiers are closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from tierfs.errors import TierfsError
from tierfs.host.pending.levels import Level

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers
    from tierfs.session.tiers import Launcher

__all__ = ["finish", "finish_at_exit"]

# A flusher of its own goes on; a thread of this process does not.
WAIT_S = 2.0
WAIT_FOR_THREAD_S = 60.0
NAMED_MAX = 5
_logger = logging.getLogger("tierfs.store")


def finish(tiers: Tiers, url: str, launcher: Launcher) -> None:
    """Wait for what is pending, and log what is left."""
    ends = launcher.ends_with_us
    if not _pending(tiers, ends=ends):
        return
    reason = ""
    try:
        # A thread of this process has had its time, and gets no more done.
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
        after = "they are flushed when the store is next opened on this host, unless it is rebooted before"
    elif tiers.flusher.is_running():
        after = f"the flusher goes on; `tierfs wait {url}` waits for it"
    else:
        after = "no flusher runs; one is started when the store is next opened on this host"
    _logger.warning("%d files are not in %s yet%s: %s; %s", len(pending), url, reason, named, after)


def _pending(tiers: Tiers, *, ends: bool) -> list[str]:
    return list(tiers.drafts.pending_below("")) if ends else [draft.path for draft in tiers.drafts.own()]


def finish_at_exit(tiers: Tiers, url: str, launcher: Launcher) -> None:
    """Have `finish` called when this process ends; not in forked children of it, nor once nobody uses the tiers.

    ``launcher`` is one that ``tiers`` keep.
    """
    _open[tiers] = _Open(url, weakref.ref(launcher), os.getpid())
    _register(os.getpid())


class _Open(NamedTuple):
    url: str
    launcher: weakref.ref[Launcher]  # it leads to its tiers, which only their users keep
    process: int


_open: weakref.WeakKeyDictionary[Tiers, _Open] = weakref.WeakKeyDictionary()


@functools.cache
def _register(_process: int) -> None:
    # Called when all threads that the interpreter waits for have come to their end, and their saves with them.
    atexit.register(_put_away_all)
    # An interpreter that is ending takes no more: what is sealed is found by whoever opens the store next.
    with contextlib.suppress(RuntimeError):
        # Called while executors take work still, which `atexit` is too late for.
        getattr(threading, "_register_atexit", atexit.register)(_wait_for_threads)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415 - only a child has it loaded

        # `multiprocessing` ends a child without what is registered with `atexit`.
        Finalize(None, _put_away_child, exitpriority=-1)


def _wait_for_threads() -> None:
    """Wait for the flushers that are threads of this process, which need executors to get done."""
    for tiers, launcher in _opened():
        # The end logs how many are left, and why.
        with contextlib.suppress(TierfsError, OSError):
            if launcher.ends_with_us and tiers.drafts.pending_below(""):
                tiers.wait("", Level.OBJECT, WAIT_FOR_THREAD_S)


def _put_away_child() -> None:
    """Close what a process opened that multiprocessing started.

    A thread that is none of ours and is waited for may be in the midst of a save: then nothing is closed, as if the process were
    killed when that is done.
    """
    known = (threading.current_thread(), threading.main_thread())
    if all(thread.daemon or thread in known or thread.name.startswith("tierfs-") for thread in threading.enumerate()):
        _put_away_all()


def _put_away_all() -> None:
    for tiers, launcher in _opened():
        url = _open.pop(tiers).url
        # With the state directory everything is gone that could be closed.
        if tiers.ram.host.directory.exists():
            try:
                finish(tiers, url, launcher)
                tiers.close()
            except (TierfsError, OSError) as error:
                # Nothing is lost by it: what is sealed is found by whoever opens the store next.
                _logger.warning("the local tiers of %s were not closed in order: %s", url, error)


def _opened() -> list[tuple[Tiers, Launcher]]:
    """The tiers that this process opened, not a parent that forked it, and still uses; the newest first."""
    known = [(tiers, one.launcher()) for tiers, one in _open.items() if one.process == os.getpid()]
    return [(tiers, launcher) for tiers, launcher in reversed(known) if launcher is not None]
