"""The results of a repair."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tierfs.errors import FormatError
from tierfs.format import keys


@dataclass(frozen=True, slots=True)
class RepairItem:
    """An action of a repair, or one that is still necessary.

    Attributes:
        key: The object concerned.
        problem: The problem, in words.
        how: The source of the right bytes, the key of the damaged bytes' copy, or the reason why nothing is done.
    """

    key: str
    problem: str
    how: str


@dataclass(frozen=True, slots=True)
class FileLoss:
    """The data that a file has lost.

    Attributes:
        path: Path of the file.
        ranges: Offset and length of each part that cannot be read.
        keys: The chunk objects at fault.
    """

    path: str
    ranges: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]


@dataclass(slots=True)
class RepairReport:
    """The findings and actions of a repair.

    Attributes:
        dry_run: Whether nothing was changed: objects listed as mended or moved would be.
        records: Records that were read.
        chunks: Chunk objects that files need.
        mended: Objects that are sound again.
        moved: Objects that could not be saved, and where they are kept.
        left: Objects that were left unchanged, and why.
        vanished: Files whose record vanished without a tombstone, or the directory or key that shows that some have.
        lost: Files of which a part cannot be read. A file whose record was moved is in ``moved`` instead.
    """

    dry_run: bool = False
    records: int = 0
    chunks: int = 0
    mended: list[RepairItem] = field(default_factory=list)
    moved: list[RepairItem] = field(default_factory=list)
    left: list[RepairItem] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    lost: list[FileLoss] = field(default_factory=list)

    def mend(self, key: str, problem: str, source: str) -> None:
        self.mended.append(RepairItem(key, problem, source))

    def leave(self, key: str, problem: str, reason: str) -> None:
        self.left.append(RepairItem(key, problem, reason))

    @property
    def lost_files(self) -> list[str]:
        found = []
        for each in self.moved:
            if each.key.startswith(keys.TREE):
                try:
                    found.append(keys.parse_record_key(each.key))
                except FormatError:
                    continue  # not the key of a record
        return found

    @property
    def is_whole(self) -> bool:
        """Whether no file has lost data."""
        return not (self.lost or self.lost_files or self.vanished)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. ``rewritten`` is empty: no record is rewritten for a chunk."""
        return {**asdict(self), "rewritten": [], "lost_files": self.lost_files, "whole": self.is_whole}
