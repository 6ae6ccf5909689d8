"""Which save comes before a file: the one that it names itself, or one that is found by what saves are called."""

from __future__ import annotations

import heapq
import re
import threading
from collections.abc import Iterator, Sequence

from tierfs.format.manifest import Manifest
from tierfs.host.pending.record import Draft
from tierfs.store.encode.series import group_of, last_number, numbered, numbers
from tierfs.store.store import Store
from tierfs.store.tree.walk import names_in

__all__ = ["ListedNames", "find_parent", "given_parent"]

PARENT = "parent"
"""What a file's metadata names the path under that its deltas are to be taken against."""
PARENTS_TRIED_MAX = 4
NAMES_KEPT_S = 5.0
LISTINGS_KEPT_MAX = 100


class ListedNames:
    """Names in directories of the object tier, each listing kept for five seconds. Safe for use by many threads.

    A save that another host published within that time is not found as a parent, so its chunks are no base: that costs bytes, and
    nothing else.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, list[str]]] = {}

    def __repr__(self) -> str:
        return f"ListedNames({len(self._kept)} directories)"

    def in_directory(self, path: str) -> list[str]:
        """See `tierfs.store.tree.walk.names_in`."""
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
    """What the file says itself that it comes after: a path in the store, or a URL of it."""
    given = manifest.metadata.get(PARENT)
    if not isinstance(given, str):
        return None
    url = store.where("").rstrip("/")
    path = given.removeprefix("tierfs::")
    return (path.removeprefix(url) if path.startswith(f"{url}/") else given).strip("/")


def find_parent(listed: ListedNames, draft: Draft) -> str | None:
    """The save before one that this flusher knows nothing of: what it overwrites, or its namesake in the directory before."""
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
        # All of it may have been deleted in the newest ones.
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
    """The file of a group that lies in a directory."""
    found = [
        path for name in listed.in_directory(directory) if group_of(path := f"{directory}/{name}".lstrip("/")) == group
    ]
    return max(found, default=None)


def _below(parts: Sequence[str], counting: str, before: str) -> Iterator[list[str]]:
    """Which directories may be below one in place of those below a later one, if their names count the saves.

    The same number may be in those below, checkpoint-20/global_step20, or be there for something else: step_2/rank_2.
    """
    number = re.compile(rf"(?<!\d){last_number(counting)}(?!\d)")
    counted = [number.sub(last_number(before), part) for part in parts]
    yield counted
    if counted != [*parts]:
        yield [*parts]
