"""Open an object tier by the name of its protocol, and wrap it with limits, retries and counters.

The first use of a backend imports it: fsspec and asyncio take 7 MiB, which the flusher of a local directory saves.
"""

from __future__ import annotations

import importlib.util
import json
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tierfs.errors import InvalidInputError
from tierfs.objects.backends.local import LocalObjects
from tierfs.objects.backends.shared_session import SharedSession
from tierfs.objects.protocol import ObjectTier
from tierfs.objects.wrappers.metrics import MeasuredObjects
from tierfs.objects.wrappers.retry import ATTEMPTS, RetryingObjects
from tierfs.objects.wrappers.throttle import LimitedObjects

if TYPE_CHECKING:
    from tierfs.objects.backends.cloud import CloudObjects

OPTIONS = ("verify_writes",)
"""Options that tierfs interprets itself and does not pass to the filesystem: see `tierfs.objects.wrappers.verify`."""


class _Cloud(NamedTuple):
    """A cloud: the package it needs, the extra of tierfs that installs it, and how to connect and open."""

    package: str
    extra: str
    connect: Callable[[Mapping[str, object]], Any]
    open: Callable[[Any, str], CloudObjects]


def _s3() -> _Cloud:
    from tierfs.objects.backends.s3 import connect_s3, open_s3  # noqa: PLC0415 - see the module's description; as below

    return _Cloud("s3fs", "s3", connect_s3, open_s3)


def _azure() -> _Cloud:
    from tierfs.objects.backends.azure import connect_azure, open_azure  # noqa: PLC0415

    return _Cloud("adlfs", "azure", connect_azure, open_azure)


def _gcs() -> _Cloud:
    from tierfs.objects.backends.gcs import connect_gcs, open_gcs  # noqa: PLC0415

    return _Cloud("gcsfs", "gcs", connect_gcs, open_gcs)


_CLOUDS = {"s3": _s3, "s3a": _s3, "abfs": _azure, "abfss": _azure, "az": _azure, "gs": _gcs, "gcs": _gcs}

# By package and options. The search for a store tries one directory after another, all in one bucket.
_sessions: weakref.WeakValueDictionary[str, SharedSession[Any]] = weakref.WeakValueDictionary()
_latest: list[SharedSession[Any]] = []  # keeps the session open between two directories, while no tier uses it


def connect(protocol: str, path: str, options: Mapping[str, object], *, attempts: int = ATTEMPTS) -> MeasuredObjects:
    """Return the object tier at ``path``. Sends no request, but some filesystems connect at once, as SFTP does.

    Args:
        protocol: ``file``, ``memory``, or any protocol of fsspec.
        path: Path there, without the protocol.
        options: Options of the filesystem, credentials for example. Those in `OPTIONS` are ignored; ``file`` and
            ``memory`` ignore all.
        attempts: How often a request is sent at most.

    Raises:
        InvalidInputError: The protocol is unknown, a package that it needs is missing, or the filesystem refuses an
            option.
        StoreError, ReadOnlyError: The filesystem connects at once, and the connection failed.
    """
    backend: ObjectTier
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if protocol in ("file", "local"):
        backend = LocalObjects(path)
    elif protocol == "memory":
        from tierfs.objects.backends.memory import MemoryObjects  # noqa: PLC0415

        backend = MemoryObjects(path)
    elif protocol in _CLOUDS:
        cloud = _CLOUDS[protocol]()
        backend = cloud.open(_session_with(cloud, protocol, given), path)
    else:
        from tierfs.objects.backends.fsspec import FsspecObjects, new_filesystem  # noqa: PLC0415

        backend = FsspecObjects(new_filesystem(protocol, given), path)
    return MeasuredObjects(RetryingObjects(LimitedObjects(backend), attempts=attempts))


def _session_with(cloud: _Cloud, protocol: str, options: Mapping[str, object]) -> SharedSession[Any]:
    if importlib.util.find_spec(cloud.package) is None:
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: pip install 'tierfs[{cloud.extra}]'")
    token = f"{cloud.package}:{json.dumps(options, sort_keys=True, default=repr)}"
    session = _sessions.get(token)
    if session is None:
        session = _sessions[token] = SharedSession(protocol, partial(cloud.connect, options))
    _latest[:] = [session]
    return session
