"""A checkpoint's metadata document as JSON, read without torch: its checks, tierfs's own note, and facts for a list.

Each value is checked before it is used: an untrusted document raises an error and does nothing else.

Format: docs/reference/checkpoint-format.md, "The metadata document".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierfs import digest
from tierfs.checked_json import parse_value
from tierfs.errors import CorruptionError, FormatError, InvalidInputError

INTEGER_MAX = (1 << 63) - 1
FILE_NAME_BYTES_MAX = 255


class Checked:
    """One object of a document. Every method raises `CorruptionError` if the member is wrong.

    Errors begin with ``where``.
    """

    __slots__ = ("document", "where")

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.document = document
        self.where = where

    def wrong(self, what: str) -> CorruptionError:
        """Return the error for something wrong in this object."""
        return CorruptionError(f"{self.where}: {what}: damaged, or written by a faulty program", path=self.where)

    def integer(self, name: str) -> int:
        """Return a member that is an integer from 0 to `INTEGER_MAX`."""
        value = self.document.get(name)
        if type(value) is not int or not 0 <= value <= INTEGER_MAX:
            raise self.wrong(f"{name} is {value!r}")
        return value

    def integers(self, name: str, count_max: int) -> tuple[int, ...]:
        """Return a member that is a list of at most ``count_max`` integers from 0 to `INTEGER_MAX`."""
        values = self.items(name)
        if values and (
            len(values) > count_max
            or set(map(type, values)) != {int}
            or not 0 <= min(values) <= max(values) <= INTEGER_MAX
        ):
            raise self.wrong(f"{name} is {values!r:.100}")
        return tuple(values)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a member that is a string and matches the whole pattern."""
        value = self.document.get(name)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            raise self.wrong(f"{name} is {value!r}")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a member that is a string or null."""
        return None if self.document.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """Return a member that is true or false."""
        value = self.document.get(name)
        if not isinstance(value, bool):
            raise self.wrong(f"{name} is {value!r}")
        return value

    def known(self, name: str, values: Mapping[str, Any]) -> Any:
        """Return the value that a member, a string, stands for.

        Raises:
            FormatError: The string stands for nothing in this version.
        """
        value = self.text(name)
        if value not in values:
            raise FormatError(f"{self.where}: this torch has no {name} {value!r}: use a newer one", path=self.where)
        return values[value]

    def items(self, name: str) -> list[Any]:
        """Return a member that is a list."""
        value = self.document.get(name)
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {value!r}")
        return value

    def inner(self, name: str) -> Checked:
        """Return a member that is an object."""
        return self._inside(self.document.get(name), name)

    def each(self, name: str) -> Iterator[Checked]:
        """Yield the objects of a member that is a list."""
        for number, value in enumerate(self.items(name)):
            yield self._inside(value, f"{name}[{number}]")

    def members(self, name: str, *, is_file: bool = False) -> Iterator[tuple[str, Checked]]:
        """Yield the members of an object of objects. With ``is_file``, each name has to be a valid file name."""
        inner = self.inner(name)
        for key, value in inner.document.items():
            if is_file and not is_file_name(key):
                raise inner.wrong(f"{key!r} is not a valid file name in a checkpoint")
            yield key, inner._inside(value, repr(key))

    def _inside(self, value: Any, name: str) -> Checked:
        if not isinstance(value, dict):
            raise self.wrong(f"{name} is {value!r:.100}, not an object")
        return Checked(value, f"{self.where}: {name}")


def is_file_name(name: str) -> bool:
    """Return whether a name is valid for a file of a checkpoint: in the checkpoint's directory, and not hidden."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(encoded) <= FILE_NAME_BYTES_MAX and not name.startswith(".") and not {"/", "\\", "\0"} & set(name)


def refuse_names(names: Iterable[object]) -> None:
    """Check that all names are strings of valid Unicode, as keys in JSON have to be.

    Raises:
        InvalidInputError: A name is not. The message names it.
    """
    for name in names:
        if not isinstance(name, str):
            raise InvalidInputError(f"{name!r}: a name in a checkpoint has to be a string, not {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(f"{name!r:.100}: a name in a checkpoint has to be valid Unicode") from None


FORMAT = "tierfs-checkpoint"
VERSION = 1
DIMENSIONS_MAX = 64
_HEX = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """tierfs's note on a checkpoint, beside torch's metadata.

    Attributes:
        save_id: The id of the save; hexadecimal digits, drawn at random.
        sequence: Grows with each save to the same directory.
        created_ns: When the metadata was written, in nanoseconds since the epoch.
        step: The training step; ``None`` if it was not given.
        files: The length in bytes of every file of the checkpoint.
        kind: ``full`` or ``light``; ``None`` if no training manager saved it.
        run: The id of the training run's line; ``None`` if no training manager saved it.
    """

    save_id: str
    sequence: int
    created_ns: int
    step: int | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    kind: str | None = None
    run: str | None = None


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return a document whose version and checksum are right, without its checksum.

    Raises:
        CorruptionError, FormatError: As `tierfs.dcp.metadata.decode`.
    """
    try:
        document = parse_value(data, where, numbers="integers", unique=True)
    except FormatError:
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptionError(f"{where} is not a checkpoint's metadata: damaged, or not written by tierfs", path=where)
    if type(document.get("version")) is not int or document["version"] != VERSION:
        raise FormatError(
            f"{where}: the checkpoint's format is {document.get('version')!r}, but this tierfs reads {VERSION}: use a "
            "newer tierfs",
            path=where,
        )
    stated = document.pop("checksum", None)
    try:
        actual = digest.checksum(canonical(document)).hex()
    except UnicodeEncodeError:
        actual = ""
    if stated != actual or not actual:
        raise CorruptionError(f"{where}: checksum mismatch: the checkpoint's metadata is damaged", path=where)
    return document


def parse_as_written(data: bytes) -> dict[str, Any] | None:
    """Return a document whose bytes have the right checksum, five times as fast as `parse`; ``None`` for any other.

    If a key occurs twice in an object, which only a faulty writer does, this does not notice it.
    """
    stated, _, rest = data.partition(b'",')
    if stated != b'{"checksum":"' + digest.checksum(b"{", rest).hex().encode():
        return None
    try:
        document = json.loads(b"{" + rest)
    except (ValueError, RecursionError):
        return None
    is_usual = isinstance(document, dict) and document.get("format") == FORMAT and document.get("version") == VERSION
    return document if is_usual else None


def read_note(root: Checked) -> CheckpointNote:
    """Return tierfs's note in a document."""
    return CheckpointNote(
        save_id=root.text("save_id", _HEX),
        sequence=root.integer("sequence"),
        created_ns=root.integer("created_ns"),
        step=None if root.document.get("step") is None else root.integer("step"),
        files={name: item.integer("length") for name, item in root.members("files", is_file=True)},
        kind=root.optional_text("kind"),
        run=root.optional_text("run"),
    )


def read_place(item: Checked, files: Mapping[str, int]) -> tuple[str, int, int]:
    """Return file, offset and length of the bytes of a chunk or object. They lie inside a file of the checkpoint."""
    file, at, length = item.text("file"), item.integer("at"), item.integer("length")
    if file not in files or at + length > files[file]:
        raise item.wrong(f"{length} bytes at {at} of {file!r} are not inside a file of the checkpoint")
    return file, at, length


def read_boxes(
    tensor: Checked, shape: tuple[int, ...], files: Mapping[str, int]
) -> Iterator[tuple[Checked, tuple[int, ...], tuple[int, ...], tuple[str, int, int]]]:
    """Yield each chunk of a tensor with its offsets, its shape and its place. They lie inside the tensor, and differ."""
    seen = set()
    for chunk in tensor.each("chunks"):
        offsets, sizes = chunk.integers("offsets", DIMENSIONS_MAX), chunk.integers("shape", DIMENSIONS_MAX)
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise chunk.wrong(f"offsets {list(offsets)} and shape {list(sizes)} are not inside {list(shape)}")
        if offsets in seen:
            raise chunk.wrong(f"there are two chunks at {list(offsets)}")
        seen.add(offsets)
        yield chunk, offsets, sizes, read_place(chunk, files)


def canonical(value: object) -> bytes:
    """Return a document, or a value in it, as writers have to write it."""
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
