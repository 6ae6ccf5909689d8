"""Support for forked children: per-process objects, and resources that a child must not inherit.

A `Store` and its parts belong to the parent: a child that uses one gets an error, and opens its own. This module
handles the rest. `PerProcess` makes one object for each process. `renew_in_children` closes files and connections in a
child: if the child kept them, a lock or the other end would not notice that the parent is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_Made = TypeVar("_Made")


class Renewable(Protocol):
    """An object whose inherited state a child must not use."""

    def _renew(self) -> None:
        """Close the parent's resources, or recreate the per-process ones.

        Called in a child before any other code runs there.
        """


_logger = logging.getLogger("tierfs")
_owners: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(owner: Renewable) -> None:
    """Call ``owner._renew()`` in every process forked from here while ``owner`` lives. Holds a weak reference."""
    _owners.add(owner)


def leave_to_parent(inherited: object) -> None:
    """Keep an object of the parent process from ever being destroyed in this process, even at interpreter exit.

    Its destructor would tell the kernel to drop the parent's connections, because both processes share an epoll
    descriptor.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


class PerProcess(Generic[_Made]):
    """An object that exists once per process; a forked child makes a new one.

    Args:
        make: Makes the object.

    Attributes:
        shared: The object of this process; calling the instance returns it, too.
    """

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self.shared = make()
        renew_in_children(self)

    def __call__(self) -> _Made:
        return self.shared

    def _renew(self) -> None:
        self.shared = self._make()


def _renew_all() -> None:
    for owner in list(_owners):
        try:
            owner._renew()
        except Exception:  # noqa: PERF203 - the other owners must be renewed, too
            _logger.exception("%r could not be recreated in a forked process", owner)


os.register_at_fork(after_in_child=_renew_all)
