"""Checks of arguments that several commands share."""

from __future__ import annotations

import importlib.util

from tierfs.errors import InvalidInputError

__all__ = ["require_torch", "require_url"]


def require_url(text: str) -> None:
    """Check that an argument names something.

    Raises:
        InvalidInputError: It is empty, as a variable that is not set makes it.
    """
    if not text:
        raise InvalidInputError("an argument is empty: give a URL or a path")


def require_torch(task: str) -> None:
    """Check that torch is installed, without importing it.

    Args:
        task: A clause that says what torch is for, like ``checkpoints are read``.

    Raises:
        InvalidInputError: It is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInputError(f"{task} with torch, which is not installed: pip install 'tierfs[torch]'")
