"""Find the save that a file follows: the one that the file names itself, or one found by the names of saves.

A name has a part that counts the saves, and a part that all saves of a file share.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections.abc import Iterator, Sequence

from tierfs.format.manifest import Manifest
from tierfs.host.pending.record import Draft
from tierfs.store.store import Store
from tierfs.store.tree.walk import names_in

PARENT = "parent"
"""The metadata key under which a file names the path that its deltas are taken against."""
PARENTS_TRIED_MAX = 4
NAMES_KEPT_S = 5.0
LISTINGS_KEPT_MAX = 100
_DIGITS = re.compile(r"\d+")
_COUNTER = re.compile(r"((?:step|epoch|iter|iteration|checkpoint|ckpt)[^0-9a-z]*)\d+", re.IGNORECASE)
_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{8,}(?![0-9a-f])")  # an id that differs in every save


class ListedNames:
    """Names in directories of the object tier, each listing cached for five seconds. Safe for use by many threads.

    A save that another host publishes within that time is not found as a parent, so its chunks cannot be bases. That
    costs bytes and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, list[str]]] = {}

    def __repr__(self) -> str:
        return f"ListedNames({len(self._kept)} directories)"

    def in_directory(self, path: str) -> list[str]:
        """Return the names in a directory of the object tier, at most `NAMES_KEPT_S` old."""
        now = self._store.clock.monotonic()
        with self._lock:
            listed_at, names = self._kept.get(path, (-NAMES_KEPT_S, []))
        if now - listed_at < NAMES_KEPT_S:
            return names
        names = names_in(self._store, path)
        with self._lock:
            self._kept.pop(path, None)
            self._kept[path] = now, names
            if len(self._kept) > LISTINGS_KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        return names


def given_parent(store: Store, manifest: Manifest) -> str | None:
    """Return the parent that the file's metadata names, as a path in the store; ``None`` if it names none.

    The metadata may have the path or a URL.
    """
    given = manifest.metadata.get(PARENT)
    if not isinstance(given, str):
        return None
    url = store.where("").rstrip("/")
    path = given.removeprefix("tierfs::")
    return (path.removeprefix(url) if path.startswith(f"{url}/") else given).strip("/")


def find_parent(listed: ListedNames, draft: Draft) -> str | None:
    """Find the save before a draft whose series this flusher does not know.

    Returns:
        The path itself if the draft replaces a file. Else the file of the same group in an earlier save, or
        ``None``.
    """
    if draft.base.version is not None:
        return draft.path
    parts = draft.path.split("/")
    group = group_of(draft.path)
    counting = numbered(parts)
    if not counting:
        return _newest(listed, "/".join(parts[:-1]), group)
    for at in reversed(counting):
        names = [name for name in listed.in_directory("/".join(parts[:at])) if () < numbers(name) < numbers(parts[at])]
        alike = [name for name in names if group_of("/".join([*parts[:at], name, *parts[at + 1 :]])) == group]
        # The newest of these directories may be empty, because their files were deleted.
        for name in heapq.nlargest(PARENTS_TRIED_MAX, alike, key=numbers):
            if at == len(parts) - 1:
                return "/".join([*parts[:at], name])
            for below in _below(parts[at + 1 : -1], parts[at], name):
                directory = "/".join([*parts[:at], name, *below])
                found = _newest(listed, directory, group) if group_of(f"{directory}/{parts[-1]}") == group else None
                if found is not None:
                    return found
    return None


def _newest(listed: ListedNames, directory: str, group: str) -> str | None:
    """Return the file of a group in a directory; if there are several, the one whose path sorts last."""
    found = [
        path for name in listed.in_directory(directory) if group_of(path := f"{directory}/{name}".lstrip("/")) == group
    ]
    return max(found, default=None)


def _below(parts: Sequence[str], counting: str, before: str) -> Iterator[list[str]]:
    """Yield the directories that may be below an earlier save in place of those below a later one.

    The directories below may count the save too, as in checkpoint-20/global_step20. Or they may have the same number
    for another reason, as in step_2/rank_2.
    """
    number = re.compile(rf"(?<!\d){last_number(counting)}(?!\d)")
    counted = [number.sub(last_number(before), part) for part in parts]
    yield counted
    if counted != [*parts]:
        yield [*parts]


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
