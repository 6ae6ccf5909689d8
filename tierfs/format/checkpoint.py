"""The parts of a checkpoint's metadata that publishing needs: its save, and the files that it names.

docs/reference/checkpoint-format.md, "Commit" and "The metadata document". The rest of the document is torch's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tierfs.errors import FormatError
from tierfs.format.manifest import Manifest

__all__ = ["ROOT", "SEQUENCE_MAX", "SaveMark", "is_save_id", "named_files", "turn_of"]

ROOT = ".metadata"
"""The file of a checkpoint's directory that holds its metadata, and is published last."""
SEQUENCE_MAX = (1 << 63) - 1
_KEY = "checkpoint"
_SAVE_ID = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class SaveMark:
    """The save of a file that holds a checkpoint's metadata. The greater of two began later.

    Attributes:
        sequence: Grows with each save to the same place.
        save_id: Drawn at random; hexadecimal digits.
    """

    sequence: int
    save_id: str

    def as_metadata(self) -> dict[str, object]:
        """The JSON for the file's manifest."""
        return {_KEY: {"save_id": self.save_id, "sequence": self.sequence}}

    @classmethod
    def of(cls, metadata: Mapping[str, object]) -> SaveMark | None:
        """The mark in a manifest; ``None`` for a file that is no checkpoint's metadata, or has an impossible mark."""
        said = metadata.get(_KEY)
        if not isinstance(said, dict):
            return None
        sequence, save_id = said.get("sequence"), said.get("save_id")
        if type(sequence) is not int or not 0 <= sequence <= SEQUENCE_MAX:
            return None
        if not isinstance(save_id, str) or not is_save_id(save_id):
            return None
        return cls(sequence, save_id)


def is_save_id(name: str) -> bool:
    """Whether a file of this name may be what announces a save, which is called by its id."""
    return _SAVE_ID.fullmatch(name) is not None


def turn_of(manifest: Manifest | None) -> SaveMark | None:
    """The save that a checkpoint's metadata is of; ``None`` where there is no file.

    Metadata of no save, stock DCP's for one, counts as begun when it was written.
    """
    if manifest is None:
        return None
    return SaveMark.of(manifest.metadata) or SaveMark(min(manifest.modified_ns, SEQUENCE_MAX), "")


def named_files(document: bytes, where: str) -> frozenset[str]:
    """Names of the files that a metadata document says its checkpoint lies in.

    Args:
        document: Its bytes.
        where: How to name it in errors.

    Raises:
        FormatError: It is no such document.
    """
    try:
        files = json.loads(document)["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise FormatError(f"{where}: it is no checkpoint's metadata", path=where)
    return frozenset(files)
