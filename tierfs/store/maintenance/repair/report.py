"""The results of a repair."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tierfs.errors import FormatError
from tierfs.format import keys

__all__ = ["FileLoss", "RepairItem", "RepairReport"]


@dataclass(frozen=True, slots=True)
class RepairItem:
    """Something that was done, or has to be.

    Attributes:
        key: The object concerned.
        problem: What was wrong with it, in words.
        how: Where the right bytes came from; where the damaged ones are now; or why nothing is done.
    """

    key: str
    problem: str
    how: str


@dataclass(frozen=True, slots=True)
class FileLoss:
    """What a file has lost.

    Attributes:
        path: Of the file.
        ranges: Offset and length of each part that cannot be read.
        keys: The chunk objects that are at fault.
    """

    path: str
    ranges: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]


@dataclass(slots=True)
class RepairReport:
    """What was found and done.

    Attributes:
        dry_run: Whether nothing was changed: what is said to be mended or moved would be.
        records: Records that were read.
        chunks: Chunk objects that files need.
        mended: What is whole again.
        rewritten: Files whose record names another object of the same content now.
        moved: What could not be saved, and where it is kept.
        left: What was left as it is, and why.
        lost: Files of which a part cannot be read. A file whose record was moved is among ``moved``.
    """

    dry_run: bool = False
    records: int = 0
    chunks: int = 0
    mended: list[RepairItem] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    moved: list[RepairItem] = field(default_factory=list)
    left: list[RepairItem] = field(default_factory=list)
    lost: list[FileLoss] = field(default_factory=list)

    @property
    def lost_files(self) -> list[str]:
        """Files of which the record was lost."""
        found = []
        for each in self.moved:
            if each.key.startswith(keys.TREE):
                try:
                    found.append(keys.parse_record_key(each.key))
                except FormatError:
                    continue  # it never was a record
        return found

    @property
    def is_whole(self) -> bool:
        """Whether no file has lost anything."""
        return not self.lost and not self.lost_files

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "lost_files": self.lost_files, "whole": self.is_whole}
