"""Locks that survive a fork: a child gets its own, since a thread that it does not have may hold its parent's."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["renew_in_children"]


class Renewable(Protocol):
    """Something that holds locks."""

    def _renew(self) -> None:
        """Make new ones. Called in a child before anything else runs there."""


_owners: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(owner: Renewable) -> None:
    """Have ``owner`` make its locks anew in every process forked from here, for as long as it lives."""
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner._renew()


os.register_at_fork(after_in_child=_renew_all)
