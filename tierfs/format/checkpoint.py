"""The parts of a checkpoint's metadata that publishing needs: its save, and the files that it names.

docs/reference/checkpoint-format.md, "Commit" and "The metadata document". torch reads the rest of the document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierfs.checked_json import parse_object
from tierfs.errors import FormatError
from tierfs.format.manifest import Manifest

ROOT = ".metadata"
"""The file in a checkpoint's directory that holds its metadata. It is published last."""
SEQUENCE_MAX = (1 << 63) - 1
_KEY = "checkpoint"
_RANK_FILE = re.compile(r"__([0-9]{1,9})\.metadata")
_SAVE_ID = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class SaveMark:
    """The save that wrote a checkpoint's metadata. The greater of two marks began later.

    Attributes:
        sequence: Grows with each save to the same path.
        save_id: Random hexadecimal digits.
        replaces: The saves that this one saw when it began, and may replace; ``None`` if it may replace any save that
            began before.
    """

    sequence: int
    save_id: str
    replaces: frozenset[SaveMark] | None = field(default=None, compare=False)

    def may_replace(self, other: SaveMark | None) -> bool:
        """Return whether this save may be published where ``other`` is; ``None`` stands for no save."""
        return other is None or (other < self and (self.replaces is None or other in self.replaces))

    @staticmethod
    def without(metadata: Mapping[str, object]) -> dict[str, object]:
        """Return the metadata of a manifest for another path: the file there is not the save's own."""
        return {name: value for name, value in metadata.items() if name != _KEY}

    def as_metadata(self) -> dict[str, object]:
        """Return the entry for the metadata of the file's manifest."""
        said: dict[str, object] = {"save_id": self.save_id, "sequence": self.sequence}
        if self.replaces is not None:
            said["replaces"] = [[other.sequence, other.save_id] for other in sorted(self.replaces)]
        return {_KEY: said}

    @classmethod
    def of(cls, metadata: Mapping[str, object]) -> SaveMark | None:
        """Return the mark in a manifest's metadata; ``None`` if there is none or it is invalid."""
        said = metadata.get(_KEY)
        if not isinstance(said, dict):
            return None
        sequence, save_id = said.get("sequence"), said.get("save_id")
        if type(sequence) is not int or not 0 <= sequence <= SEQUENCE_MAX:
            return None
        if not isinstance(save_id, str) or not is_save_id(save_id):
            return None
        replaces = said.get("replaces")
        if not isinstance(replaces, list):
            return cls(sequence, save_id)
        seen = (other for other in replaces if isinstance(other, list) and [type(each) for each in other] == [int, str])
        return cls(sequence, save_id, frozenset(cls(*other) for other in seen))


def is_part(metadata: Mapping[str, object]) -> bool:
    """Return whether this is the metadata of a shard file's manifest."""
    return "checkpoint_part" in metadata


def is_save_id(name: str) -> bool:
    """Return whether a file of this name may be the file that announces a save, which is named after the save id."""
    return _SAVE_ID.fullmatch(name) is not None


def turn_of(manifest: Manifest | None) -> SaveMark | None:
    """Return the save that wrote a checkpoint's metadata; ``None`` if there is no file.

    Metadata without a mark, such as that of stock DCP, counts as a save that began at the file's modification time.
    """
    if manifest is None:
        return None
    return SaveMark.of(manifest.metadata) or SaveMark(min(manifest.modified_ns, SEQUENCE_MAX), "")


def named_files(document: bytes, where: str) -> frozenset[str]:
    """Return the names of the files that a metadata document lists.

    Args:
        where: The name of the document in errors.

    Raises:
        FormatError: The bytes are no metadata document.
    """
    try:
        files = parse_object(document, where).get("files")
    except FormatError:
        files = None
    if not isinstance(files, dict):
        raise FormatError(f"{where}: not the metadata of a checkpoint", path=where)
    return frozenset(files)


def metadata_file(rank: int | None = None) -> str:
    """Return the name of a checkpoint's metadata file: of all ranks, or of one that saved without collectives."""
    return ROOT if rank is None else f"__{rank}{ROOT}"


def rank_of(name: str) -> int | None:
    """Return the rank that saved a metadata file of this name without collectives; ``None`` for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else int(match[1])
