"""Check one object of an untrusted JSON document: the type, range and form of each member."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tierfs.errors import CorruptionError, FormatError, InvalidInputError

INTEGER_MAX = (1 << 63) - 1
FILE_NAME_BYTES_MAX = 255


class Checked:
    """One object of a document. Every method raises `CorruptionError` if the member is wrong.

    Args:
        document: As it was parsed.
        where: Its name in errors.
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
