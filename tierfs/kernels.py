"""Access to the compiled loops of ``_kernels.c``; without them, numpy does the same more slowly.

They are used if they can be imported. ``TIERFS_KERNELS=0`` disables them.
"""

from __future__ import annotations

import os
from types import ModuleType


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("TIERFS_KERNELS") == "0":
        return None, "NumPy (TIERFS_KERNELS=0)"
    try:
        from tierfs import _kernels  # noqa: PLC0415 - may be missing
    except ImportError as error:
        return None, f"NumPy (not built: {error})"
    return _kernels, "compiled"


active, _how = _load()
"""The extension module; ``None`` if it is not built or is disabled. Tests set it."""


def status() -> str:
    """Return ``compiled``, or ``NumPy`` and why."""
    return _how
