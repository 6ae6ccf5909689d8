"""The names of a file's saves: the part of the path that counts them, and the name that all saves share."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DIGITS = re.compile(r"\d+")
_COUNTER = re.compile(r"((?:step|epoch|iter|iteration|checkpoint|ckpt)[^0-9a-z]*)\d+", re.IGNORECASE)
_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{8,}(?![0-9a-f])")  # an id that differs in every save


def numbered(parts: Sequence[str]) -> list[int]:
    """Return the indexes of the path components that count the saves.

    These are the components that say so, like ``step_20``. Without any, they are the directories that are a number,
    else the last directory with a number in it, else the file's name. Other numbers in the name of a file that is new
    with every save mean something else, such as its rank.
    """
    directories = parts[:-1]
    counting = [at for at, part in enumerate(parts) if _COUNTER.search(part)]
    counting = counting or [at for at, part in enumerate(directories) if part.isdecimal()]
    counting = counting or [at for at, part in enumerate(directories) if _DIGITS.search(part)][-1:]
    if not counting and _DIGITS.search(parts[-1]) and not _RANDOM.search(parts[-1]):
        return [len(parts) - 1]
    return counting


def numbers(name: str) -> tuple[int, ...]:
    """Return all numbers in a name, in order."""
    return tuple(int(number) for number in _DIGITS.findall(name))


def last_number(name: str) -> str:
    return str(_DIGITS.findall(name)[-1])


def group_of(path: str) -> str:
    """Return the name that all saves of a file share: the path with its counters and random ids masked."""
    parts = path.split("/")
    for at in numbered(parts):
        masked, found = _COUNTER.subn(r"\1#", parts[at])
        parts[at] = masked if found else _DIGITS.sub("#", parts[at])
    return _RANDOM.sub("*", "/".join(parts))
