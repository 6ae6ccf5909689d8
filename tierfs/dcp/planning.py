"""While DCP plans a save or a load, no garbage is collected.

Plans of a thousand tensors are a hundred thousand objects: each is made, pickled for the coordinator and back. They set off a
collection of all generations, for which training waits longer than for the copy of its state, and are gone when all is planned.
"""

from __future__ import annotations

import threading

from tierfs.gc_pause import Uncollected

__all__ = ["begin_planning", "end_planning"]

# DCP plans for less, unless there are very many ranks or tensors. Where planning fails nobody says so.
PLANNING_S_MAX = 2.0


def begin_planning() -> None:
    """Put collections off until `end_planning` on this thread, or for two seconds."""
    end_planning()
    _here.uncollected = Uncollected(PLANNING_S_MAX)


def end_planning() -> None:
    """Put them off no longer."""
    if _here.uncollected is not None:
        _here.uncollected.end()
        _here.uncollected = None


class _PlanningHere(threading.local):
    uncollected: Uncollected | None = None


_here = _PlanningHere()
