"""Find the save that a file follows, and the layout of a file that is stored.

A file names the save before it in its metadata, or the names of saves tell.
"""

from __future__ import annotations

import bisect
import heapq
import re
import threading
from collections.abc import Iterator, Sequence

from tierfs.codec import Span
from tierfs.digest import BLOCK_BYTES
from tierfs.format.manifest import Manifest
from tierfs.host.pending.record import Draft
from tierfs.store.encode.tensors import group_of, last_number, layout_of, numbered, numbers
from tierfs.store.read.reader import Reader
from tierfs.store.store import Store
from tierfs.store.tree.walk import names_in

LOOK_BLOCKS_MAX = 1024
"""Most blocks fetched to find a file's layout: as many as a large model has tensors, in one to four requests each."""
HELD_BLOCKS = 3  # a parser looks 64 KiB ahead, which may cross the small chunk that a file begins with
PARENT = "parent"
"""The metadata key under which a file names the path that its deltas are taken against."""
PARENTS_TRIED_MAX = 4
NAMES_KEPT_S = 5.0
LISTINGS_KEPT_MAX = 100


def stored_layout(file: Reader) -> list[Span] | None:
    """Return the layout of a file in the object tier; ``None`` if finding it takes more than `LOOK_BLOCKS_MAX` blocks.

    Raises:
        CorruptionError, StoreError, ReadOnlyError, FormatError: The file cannot be read.
    """
    try:
        return layout_of(_Blocks(file).read_into, file.length)
    except _TooManyBlocksError:
        return None


class _TooManyBlocksError(Exception):
    pass


class _Blocks:
    """Reads a file in small pieces, front to back with a short look ahead, and fetches each block once.

    Raises `_TooManyBlocksError` instead of fetching more than `LOOK_BLOCKS_MAX` blocks.
    """

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._held: list[tuple[int, memoryview]] = []  # offset in the file, and block
        self._left = LOOK_BLOCKS_MAX

    def read_into(self, start: int, out: memoryview) -> None:
        at, end = start, start + len(out)
        while at < end:
            begin, block = self._block(at)
            stop = min(end, begin + len(block))
            out[at - start : stop - start] = block[at - begin : stop - begin]
            at = stop

    def _block(self, at: int) -> tuple[int, memoryview]:
        for begin, block in self._held:
            if begin <= at < begin + len(block):
                return begin, block
        if not self._left:
            raise _TooManyBlocksError
        self._left -= 1
        starts = self._file.starts
        number = bisect.bisect_right(starts, at) - 1
        begin = at - (at - starts[number]) % BLOCK_BYTES
        block = memoryview(bytearray(min(BLOCK_BYTES, starts[number + 1] - begin)))
        self._file.read_into(begin, block)
        self._held = [*self._held[1 - HELD_BLOCKS :], (begin, block)]
        return begin, block


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
