"""At the end of a process: a bounded wait for what it has pending, then a word on what is left and who goes on with it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierfs.errors import TierfsError
from tierfs.flush.levels import Level

if TYPE_CHECKING:
    from tierfs.flush.tiers import Tiers

__all__ = ["finish", "finish_at_exit"]

# A flusher of its own goes on; a thread of this process does not.
WAIT_S = 2.0
WAIT_FOR_THREAD_S = 60.0
NAMED_MAX = 5
_logger = logging.getLogger("tierfs.store")


class Launcher(Protocol):
    """Who started the flusher, if this process did."""

    @property
    def ends_with_us(self) -> bool:
        """Whether the flusher is a thread of this process."""


def finish(tiers: Tiers, url: str, launcher: Launcher) -> bool:
    """Wait for what is pending, and log what is left. Returns whether nothing is."""
    ends = launcher.ends_with_us
    pending = tiers.drafts.pending_below("") if ends else {draft.path: draft for draft in tiers.drafts.own()}
    if not pending:
        return True
    reason = ""
    try:
        tiers.wait("", Level.OBJECT, WAIT_FOR_THREAD_S if ends else WAIT_S)
    except TimeoutError:
        pass
    except TierfsError as error:
        reason = f" ({error})"
    pending = tiers.drafts.pending_below("") if ends else {draft.path: draft for draft in tiers.drafts.own()}
    if not pending:
        return True
    named = ", ".join(sorted(pending)[:NAMED_MAX]) + (", ..." if len(pending) > NAMED_MAX else "")
    if ends:
        after = "they are flushed when the store is next opened on this host, unless it is rebooted before"
    elif tiers.flusher.is_running():
        after = f"the flusher goes on; `tierfs wait {url}` waits for it"
    else:
        after = "no flusher runs; one is started when the store is next opened on this host"
    _logger.warning("%d files are not in %s yet%s: %s; %s", len(pending), url, reason, named, after)
    return False


def finish_at_exit(tiers: Tiers, url: str, launcher: Launcher) -> None:
    """Have `finish` called when this process ends; not in forked children of it, nor once nobody uses the tiers.

    ``launcher`` is one that ``tiers`` keep.
    """
    _open[tiers] = _Open(url, weakref.ref(launcher), os.getpid())
    _register_once()


class _Open(NamedTuple):
    url: str
    launcher: weakref.ref[Launcher]  # it leads to its tiers, which only their users keep
    process: int


_open: weakref.WeakKeyDictionary[Tiers, _Open] = weakref.WeakKeyDictionary()


@functools.cache
def _register_once() -> None:
    # Before the interpreter forbids new threads and tasks: a flusher that is a thread needs both to get done.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for tiers, (url, known, process) in reversed(list(_open.items())):
        launcher = known()
        # With the state directory everything is gone that could be put away.
        if launcher is not None and os.getpid() == process and tiers.ram.host.directory.exists():
            try:
                finish(tiers, url, launcher)
                tiers.close()
            except (TierfsError, OSError) as error:
                # Nothing is lost by it: what is sealed is found by whoever opens the store next.
                _logger.warning("the local tiers of %s were not put away in order: %s", url, error)
