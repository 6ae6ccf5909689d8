"""Checks of arguments that several commands share."""

from __future__ import annotations

import importlib.util

from tierfs.errors import InvalidInputError

__all__ = ["require_torch"]


def require_torch(task: str) -> None:
    """Check that torch is installed, without importing it.

    Args:
        task: A clause that says what torch is for, like ``checkpoints are read``.

    Raises:
        InvalidInputError: It is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInputError(f"{task} with torch, which is not installed: pip install 'tierfs[torch]'")
