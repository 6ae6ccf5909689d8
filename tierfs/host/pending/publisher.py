"""What the flusher needs of the object tier: the store above implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tierfs.format.manifest import Row
from tierfs.host.pending.record import Draft

__all__ = ["NO_HINT", "Fill", "Hint", "Part", "Publisher", "ReadRow", "Tensor"]

Fill = Callable[[memoryview], bool]
"""Fills memory with a chunk's bytes, unverified; false if they are not there any more. It may be called again."""
ReadRow = Callable[[Row, int, memoryview], bool]
"""Copies bytes of a chunk, from an offset on, out of a tier of this host, unverified; false if none has it."""


class Part(NamedTuple):
    """A part of a chunk of the same file.

    Attributes:
        chunk: Its number in the file.
        offset: Of the part, in the chunk's bytes.
        length: Of the part.
    """

    chunk: int
    offset: int
    length: int


class Tensor(NamedTuple):
    """What is known of the elements that a block holds, or most of it.

    Attributes:
        name: What a choice for them is remembered under; empty for nothing.
        kind: ``"float"``, ``"integer"`` or ``"bytes"``.
        width: Of an element, in bytes.
    """

    name: str = ""
    kind: str = "bytes"
    width: int = 1


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of a chunk beside its bytes.

    Attributes:
        tensors: Of each block; fewer, or none, where that is not known.
        save: How many saves of its file there were before: tells how old a choice is.
        base: The chunk at its place in the keyframe, of the same length.
        sources: What it may be derived from, of twice its length in all.
        unread: Digests of chunks of the file that is replaced, to be read back: see `tierfs.store.chunks.store_chunk`. All chunks
            of a file share one set.
    """

    tensors: tuple[Tensor, ...] = ()
    save: int = 0
    base: Row | None = None
    sources: tuple[Part, ...] = ()
    unread: set[bytes] | None = field(default=None, compare=False)


NO_HINT = Hint()
"""Of a chunk of which nothing is known."""


class Publisher(Protocol):
    """Puts chunks into the object tier, then the records that name them. Safe for use by many threads."""

    def plan(self, draft: Draft, read: ReadRow) -> Sequence[Hint]:
        """What is known of each chunk of a file, before they are put; nothing where nothing is."""

    def put_chunk(
        self,
        length: int,
        fill: Fill,
        hint: Hint,
        rows: Sequence[Row | None],
        *,
        read: ReadRow,
        pace: Callable[[int], None],
    ) -> Row | None:
        """Make sure that the object tier holds a chunk's bytes, and say under which name; ``None`` if ``fill`` says that they are gone.

        Args:
            length: Of the chunk: 1 byte to 16 MiB.
            fill: Gets its bytes.
            hint: What is known of them.
            rows: Of the file, as far as they are stored: those that the hint's sources are parts of.
            read: Gets at chunks that lie on this host.
            pace: Called with the number of bytes before they are sent, to wait until so many may be.

        Raises:
            StoreError, CapacityError, ReadOnlyError: The object tier failed.
        """

    def find_chunk(self, row: Row) -> Row:
        """The same for a chunk that no local tier holds: it was published before.

        Raises:
            CorruptionError: It is not in the object tier either.
            StoreError, ReadOnlyError: The object tier failed.
        """

    def publish(self, draft: Draft, rows: Sequence[Row], *, read: ReadRow) -> None:
        """Publish the draft's record with these rows, on condition that its base is there still. May be repeated.

        Args:
            draft: The change.
            rows: Its chunks. What is not there to stay any more is stored anew.
            read: Gets at chunks that lie on this host.

        Raises:
            ConflictError: Somebody else changed the path since the draft's base was observed; theirs stands.
            StoreError, CapacityError, ReadOnlyError: The object tier failed. If it is transient, the record may be
                there or not.
        """

    def distrust(self, key: str) -> None:
        """Note that the chunk object under this key is damaged or missing: its bytes are stored anew if they come by.

        Raises:
            FormatError: It is no chunk's key.
            StoreError, ReadOnlyError: The store cannot be opened.
        """

    def asked(self) -> dict[str, Any]:
        """What the object tier was asked so far, for a person to see, as plain values. Never blocks."""
