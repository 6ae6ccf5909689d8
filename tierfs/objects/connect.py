"""From the name of a protocol to an object tier, with its limits, retries and counters around it."""

from __future__ import annotations

from collections.abc import Mapping

import fsspec
import fsspec.asyn

from tierfs.errors import InvalidInputError
from tierfs.objects.anyfs import FsspecObjects
from tierfs.objects.limit import LimitedObjects
from tierfs.objects.local import LocalObjects
from tierfs.objects.measure import MeasuredObjects
from tierfs.objects.memory import MemoryObjects
from tierfs.objects.protocol import ObjectTier
from tierfs.objects.retry import RetryingObjects

__all__ = ["connect"]

_EXTRAS = {
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
    "az": "azure",
    "gcs": "gcs",
    "gs": "gcs",
    "s3": "s3",
    "s3a": "s3",
}


def connect(protocol: str, path: str, options: Mapping[str, object]) -> MeasuredObjects:
    """Return the object tier at ``path``; costs no request.

    Args:
        protocol: ``file``, ``memory``, or that of any fsspec filesystem.
        path: Path there, without the protocol.
        options: What the filesystem is made with, credentials for example. Those of ``file`` and ``memory`` decide
            nothing here and are passed over.

    Raises:
        InvalidInputError: No such protocol, a package that it needs is missing, or it refuses an option.
    """
    backend: ObjectTier
    if protocol in ("file", "local"):
        backend = LocalObjects(path)
    elif protocol == "memory":
        backend = MemoryObjects(path)
    else:
        backend = FsspecObjects(_filesystem(protocol, options), path)
    return MeasuredObjects(RetryingObjects(LimitedObjects(backend)))


def _filesystem(protocol: str, options: Mapping[str, object]) -> fsspec.AbstractFileSystem:
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install 'tierfs[{extra}]'" if extra else str(error)
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: {remedy}") from error
    except ValueError as error:
        raise InvalidInputError(f"{protocol}:// is no protocol that fsspec knows") from error
    chosen = dict(options)
    if issubclass(kind, fsspec.asyn.AsyncFileSystem):
        # A listing remembered hides objects of others even from requests that never asked for a listing. Kinds that do
        # not remember listings may refuse the option, as SFTP does.
        chosen["use_listings_cache"] = False
    try:
        return kind(**chosen)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{protocol}:// refuses its options: {error}") from error
