"""What every part of the local tiers builds on: the size of a page, and the hook at each ordered step."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["PAGE_BYTES", "Faults", "no_faults"]

PAGE_BYTES = 4096
"""The alignment of everything in the local tiers."""

Faults = Callable[[str], None]
"""Called before and after every ordered step, with ``"before STEP"`` and ``"after STEP"``; tests raise or kill there."""


def no_faults(point: str) -> None:
    """Do nothing: the hook that production has at each step."""
