"""Pause Python's garbage collector while DCP plans a save or a load.

Plans of a thousand tensors are a hundred thousand objects: DCP creates each, pickles it for the coordinator, and
unpickles it. They would trigger a collection of all generations, which blocks training for longer than the copy of its
state. After planning they are gone.
"""

from __future__ import annotations

import threading

from tierfs.gc_pause import Uncollected

# Planning takes less, unless there are very many ranks or tensors. DCP does not tell the writer that planning failed.
PLANNING_S_MAX = 2.0


def begin_planning() -> None:
    """Pause garbage collection until `end_planning` on this thread, or for two seconds."""
    end_planning()
    _here.uncollected = Uncollected(PLANNING_S_MAX)


def end_planning() -> None:
    """Resume garbage collection."""
    if _here.uncollected is not None:
        _here.uncollected.end()
        _here.uncollected = None


class _PlanningHere(threading.local):
    uncollected: Uncollected | None = None


_here = _PlanningHere()
