"""tierfs: the storage under large-model training.

An fsspec filesystem and tiered cache. Saves are published as a whole, verified on every read, and cost only the bytes
that changed. ``import tierfs`` is cheap: its exports are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierfs.errors import TierfsError
from tierfs.satellites import MOUNT
from tierfs.urls_as_paths import refuse_urls_as_paths

if TYPE_CHECKING:
    from tierfs.fs import TierFileSystem
    from tierfs.mount.mounting import mount
    from tierfs.session import init

__all__ = ["TierFileSystem", "TierfsError", "__version__", "init", "mount"]

__version__ = "0.1.0"

refuse_urls_as_paths()

_HOMES = {"TierFileSystem": "tierfs.fs", "init": "tierfs.session"}


def __getattr__(name: str) -> Any:
    if name == "mount":
        return import_module(MOUNT)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tierfs' has no attribute {name!r}")
