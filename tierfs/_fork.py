"""Forked children, and the objects that they inherit.

A `Store` and what hangs on it are the parent's: a child that uses one gets an error, and opens its own. This file has the rest: one of something
for each process (`PerProcess`), and files and connections that a child must not keep open, since a lock or the other end would not
see that the parent is gone (`renew_in_children`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["PerProcess", "leave_to_parent", "renew_in_children"]

_Made = TypeVar("_Made")


class Renewable(Protocol):
    """Something that a child may not have as its parent left it."""

    def _renew(self) -> None:
        """Close what is the parent's, or make anew what each process has. Called in a child before anything else runs there."""


_logger = logging.getLogger("tierfs")
_owners: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(owner: Renewable) -> None:
    """Have ``owner`` told in every process forked from here, for as long as it lives."""
    _owners.add(owner)


def leave_to_parent(inherited: object) -> None:
    """Keep from being collected what belongs to the parent of this process, also when the interpreter ends.

    Its destructors would tell the kernel to forget the parent's connections: an epoll descriptor is shared with it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


class PerProcess(Generic[_Made]):
    """An object of which each process has one; a forked child's is a new one.

    Args:
        make: Makes it.

    Attributes:
        shared: This process's; a call gives it, too.
    """

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self.shared = make()
        renew_in_children(self)

    def __call__(self) -> _Made:
        """This process's."""
        return self.shared

    def _renew(self) -> None:
        self.shared = self._make()


def _renew_all() -> None:
    for owner in list(_owners):
        try:
            owner._renew()
        except Exception:  # noqa: PERF203 - the others' locks must not stay held for that
            _logger.exception("%r could not be made anew in a forked process", owner)


os.register_at_fork(after_in_child=_renew_all)
