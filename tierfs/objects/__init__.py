"""The object tier: the protocol `ObjectTier`, its backends, and wrappers that add behaviour to any of them.

Cloud clients, fsspec and asyncio are imported when a store that needs them is opened.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tierfs.objects.backends.local import LocalObjects
from tierfs.objects.checksums import checksum_for, verify_checksum
from tierfs.objects.probe import Finding, Findings, probe
from tierfs.objects.protocol import (
    CREATE,
    OVERWRITE,
    Checksum,
    Create,
    Listed,
    ObjectInfo,
    ObjectTier,
    Overwrite,
    Prefix,
    PutMode,
    Range,
    Take,
    Update,
    Use,
    Version,
)
from tierfs.objects.registry import connect
from tierfs.objects.wrappers.limits import LimitedObjects, MeasuredObjects, RetryingObjects
from tierfs.objects.wrappers.verify import PromisedObjects, as_promised
from tierfs.objects.wrappers.wrapper import WrappedObjects

if TYPE_CHECKING:
    from tierfs.objects.backends.cloud import CloudObjects
    from tierfs.objects.backends.fsspec import FsspecObjects
    from tierfs.objects.backends.memory import MemoryObjects

__all__ = [
    "CREATE",
    "OVERWRITE",
    "Checksum",
    "CloudObjects",
    "Create",
    "Finding",
    "Findings",
    "FsspecObjects",
    "LimitedObjects",
    "Listed",
    "LocalObjects",
    "MeasuredObjects",
    "MemoryObjects",
    "ObjectInfo",
    "ObjectTier",
    "Overwrite",
    "Prefix",
    "PromisedObjects",
    "PutMode",
    "Range",
    "RetryingObjects",
    "Take",
    "Update",
    "Use",
    "Version",
    "WrappedObjects",
    "as_promised",
    "checksum_for",
    "connect",
    "probe",
    "verify_checksum",
]

_LATER = {"CloudObjects": "cloud", "FsspecObjects": "fsspec", "MemoryObjects": "memory"}


def __getattr__(name: str) -> Any:
    """Import the backends that need fsspec or asyncio on first access (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.backends.{_LATER[name]}"), name)
