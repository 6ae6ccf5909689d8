"""Open an object tier by the name of its protocol, and wrap it with limits, retries and counters.

The first use of a backend imports it: fsspec and asyncio take 7 MiB, which the flusher of a local directory saves.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.objects.backends.local import LocalObjects
from tierfs.objects.backends.shared_session import SharedSession
from tierfs.objects.protocol import ObjectTier
from tierfs.objects.wrappers.limits import ATTEMPTS, LimitedObjects, MeasuredObjects, RetryingObjects

OPTIONS = ("verify_writes",)
"""Options that tierfs interprets itself and does not pass to the filesystem: see `tierfs.objects.wrappers.verify`."""


_PACKAGES = {"s3": "s3fs", "azure": "adlfs", "gcs": "gcsfs"}
"""By cloud, which is also the name of its backend and of the extra of tierfs: the package that it needs."""

_CLOUDS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure", "gs": "gcs", "gcs": "gcs"}

# By cloud and options. The search for a store tries one directory after another, all in one bucket.
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
        backend = _open_cloud(_CLOUDS[protocol], protocol, path, given)
    else:
        from tierfs.objects.backends.fsspec import FsspecObjects, new_filesystem  # noqa: PLC0415

        backend = FsspecObjects(new_filesystem(protocol, given), path)
    return MeasuredObjects(RetryingObjects(LimitedObjects(backend), attempts=attempts))


def _open_cloud(cloud: str, protocol: str, path: str, options: Mapping[str, object]) -> ObjectTier:
    if importlib.util.find_spec(_PACKAGES[cloud]) is None:
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: pip install 'tierfs[{cloud}]'")
    backend: Any = importlib.import_module(f"tierfs.objects.backends.{cloud}")
    token = f"{cloud}:{json.dumps(options, sort_keys=True, default=repr)}"
    session = _sessions.get(token)
    if session is None:
        session = _sessions[token] = SharedSession(protocol, partial(backend.connect, options))
    _latest[:] = [session]
    opened: ObjectTier = backend.open_tier(session, path)
    return opened
