"""The object tier: one narrow protocol, `ObjectTier`, its backends, and wrappers that add behaviour to any of them.

Cloud clients are imported when a store on one is opened, never before.
"""

from tierfs.objects.anyfs import FsspecObjects
from tierfs.objects.connect import connect
from tierfs.objects.limit import LimitedObjects
from tierfs.objects.local import LocalObjects
from tierfs.objects.measure import MeasuredObjects
from tierfs.objects.memory import MemoryObjects
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
    Update,
    Version,
    checksum_for,
    verify_checksum,
)
from tierfs.objects.retry import RetryingObjects
from tierfs.objects.wrapper import WrappedObjects

__all__ = [
    "CREATE",
    "OVERWRITE",
    "Checksum",
    "Create",
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
    "PutMode",
    "Range",
    "RetryingObjects",
    "Update",
    "Version",
    "WrappedObjects",
    "checksum_for",
    "connect",
    "verify_checksum",
]
