"""From the name of a protocol to an object tier, with its limits, retries and counters around it."""

from __future__ import annotations

import importlib.util
import json
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import fsspec
import fsspec.asyn

from tierfs.errors import InvalidInputError
from tierfs.objects.anyfs import FsspecObjects
from tierfs.objects.azure import connect_azure, open_azure
from tierfs.objects.clienterrors import cause_of, refused_options, translate_client_error
from tierfs.objects.cloud import CloudObjects, Sessions
from tierfs.objects.direct import Direct
from tierfs.objects.gcs import connect_gcs, open_gcs
from tierfs.objects.lanes import Lanes
from tierfs.objects.limit import LimitedObjects
from tierfs.objects.local import LocalObjects
from tierfs.objects.measure import MeasuredObjects
from tierfs.objects.memory import MemoryObjects
from tierfs.objects.protocol import ObjectTier
from tierfs.objects.retry import ATTEMPTS, RetryingObjects
from tierfs.objects.s3 import connect_s3, open_s3

__all__ = ["OPTIONS", "connect"]

OPTIONS = ("verify_writes",)
"""Options of the object tier that are ours, not its filesystem's: see `tierfs.objects.promised`."""


class _Cloud(NamedTuple):
    """A cloud: the package it needs, what pip calls it here, and how it is connected to and opened."""

    package: str
    extra: str
    sessions: type[Lanes[Any] | Direct[Any]]
    connect: Callable[[Mapping[str, object]], Any]
    open: Callable[[Any, str], CloudObjects]


_S3 = _Cloud("s3fs", "s3", Direct, connect_s3, open_s3)
_AZURE = _Cloud("adlfs", "azure", Lanes, connect_azure, open_azure)
_GCS = _Cloud("gcsfs", "gcs", Lanes, connect_gcs, open_gcs)
_CLOUDS = {"s3": _S3, "s3a": _S3, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE, "gs": _GCS, "gcs": _GCS}

# By protocol and options: a store is looked for from directory to directory, and all of these are the same bucket.
_sessions: weakref.WeakValueDictionary[str, Sessions] = weakref.WeakValueDictionary()
_latest: list[Sessions] = []  # kept open from one directory to the next: nobody uses them in between


def connect(protocol: str, path: str, options: Mapping[str, object], *, attempts: int = ATTEMPTS) -> MeasuredObjects:
    """Return the object tier at ``path``; costs no request, but some filesystems connect, as SFTP does.

    Args:
        protocol: ``file``, ``memory``, or that of any fsspec filesystem.
        path: Path there, without the protocol.
        options: What the filesystem is made with, credentials for example; those in `OPTIONS` are passed over. Those of
            ``file`` and ``memory`` decide nothing here.
        attempts: How often a request is sent at most.

    Raises:
        InvalidInputError: No such protocol, a package that it needs is missing, or it refuses an option.
        StoreError, ReadOnlyError: The filesystem connects at once, and failed.
    """
    backend: ObjectTier
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if protocol in ("file", "local"):
        backend = LocalObjects(path)
    elif protocol == "memory":
        backend = MemoryObjects(path)
    elif protocol in _CLOUDS:
        backend = _CLOUDS[protocol].open(_sessions_with(protocol, given), path)
    else:
        backend = FsspecObjects(_filesystem(protocol, given), path)
    return MeasuredObjects(RetryingObjects(LimitedObjects(backend), attempts=attempts))


def _sessions_with(protocol: str, options: Mapping[str, object]) -> Sessions:
    cloud = _CLOUDS[protocol]
    if importlib.util.find_spec(cloud.package) is None:
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: pip install 'tierfs[{cloud.extra}]'")
    token = f"{cloud.package}:{json.dumps(options, sort_keys=True, default=repr)}"
    sessions = _sessions.get(token)
    if sessions is None:
        sessions = _sessions[token] = cloud.sessions(protocol, partial(cloud.connect, options))
    _latest[:] = [sessions]
    return sessions


def _filesystem(protocol: str, options: Mapping[str, object]) -> fsspec.AbstractFileSystem:
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: {error}") from error
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
        raise refused_options(error, protocol) from cause_of(error)
    except Exception as error:  # noqa: BLE001 - raised again, as ours; of those that connect at once, as SFTP does
        raise translate_client_error(error, f"{protocol}://") from cause_of(error)
