"""Move unrepairable objects aside: copy them below ``.tierfs/lost/``, and delete them from their place afterwards."""

from __future__ import annotations

import contextlib
import logging
from datetime import datetime, timezone

from tierfs.errors import NotFoundError
from tierfs.format import keys
from tierfs.objects.checksums import put_idempotent
from tierfs.objects.protocol import CREATE
from tierfs.store.store import Store

_logger = logging.getLogger("tierfs.repair")


class Aside:
    """The place where one repair keeps objects."""

    def __init__(self, store: Store) -> None:
        self._store = store
        moment = datetime.fromtimestamp(store.clock.now_ns() / 1e9, timezone.utc)
        self._prefix = f"{keys.LOST}{moment:%Y%m%dT%H%M%SZ}-{store.random_bytes(4).hex()}/"

    def copy(self, key: str, data: bytes) -> str:
        """Keep the bytes of an object; return the key of the copy."""
        target = self._prefix + key.removeprefix(f"{keys.PRIVATE}/")
        put_idempotent(self._store.objects, target, data, mode=CREATE)
        _logger.warning("%s is kept as %s", self._store.where(key), target)
        return target

    def move(self, key: str, limit: int) -> str:
        """Keep an object's bytes, and delete the object if it has not changed. Return the key of the copy.

        Raises:
            NotFoundError, ConflictError: The object was deleted before it was read, or changed meanwhile.
            CorruptionError: The object is larger than ``limit`` bytes, and stays.
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        data, info = self._store.objects.read(key, limit)
        target = self.copy(key, data)
        with contextlib.suppress(NotFoundError):  # an earlier try deleted it, and its response was lost
            self._store.objects.delete_version(key, info.version)
        return target
