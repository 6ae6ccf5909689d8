"""What the flusher needs of the object tier: the store above implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierfs.flush.draft import Draft
from tierfs.format.manifest import Row

__all__ = ["Publisher"]


class Publisher(Protocol):
    """Puts chunks into the object tier, then the records that name them. Safe for use by many threads."""

    def put_chunk(self, raw: memoryview) -> Row:
        """Make sure that the object tier holds these bytes (1 byte to 16 MiB, borrowed), and say under which name.

        Raises:
            StoreError, CapacityError, ReadOnlyError: The object tier failed.
        """

    def find_chunk(self, row: Row) -> Row:
        """The same for a chunk that no local tier holds: it was published before.

        Raises:
            CorruptionError: It is not in the object tier either.
            StoreError, ReadOnlyError: The object tier failed.
        """

    def publish(self, draft: Draft, rows: Sequence[Row]) -> None:
        """Publish the draft's record with these rows, on condition that its base is there still. May be repeated.

        Raises:
            ConflictError: Somebody else changed the path since the draft's base was observed; theirs stands.
            StoreError, CapacityError, ReadOnlyError: The object tier failed. If it is transient, the record may be
                there or not.
        """
