"""Definitions that all parts of the local tiers share: the page size, and the hook at each ordered step."""

from __future__ import annotations

from collections.abc import Callable

PAGE_BYTES = 4096
"""Alignment of all data in the local tiers."""

Faults = Callable[[str], None]
"""Called around every ordered step with ``"before STEP"`` and ``"after STEP"``. Tests raise or kill there."""


def no_faults(point: str) -> None:
    """Do nothing: the hook in production."""
