"""Collect the records that cannot be read or have vanished, and look for signs of vanished ones.

A deletion leaves a tombstone. A record that vanished without one was lost, and the chunks that it needs are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tierfs.errors import StoreError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.maintenance.examine import Damage
from tierfs.store.store import Store
from tierfs.store.tree.references import vanished_checkpoints

VANISHED = "vanished"


class RecordLosses:
    """Unreadable and vanished records of one store.

    Args:
        store: The store.
        without: Paths. The user excuses the records at or below them.
        is_old: Returns whether an object that was put at this time is older than a grace.

    Attributes:
        unexcused: Those that the user did not excuse. The path is that of the file, or of the directory whose records
            have vanished. It is empty if all that is known is that some are missing.
        excused: The others.
    """

    def __init__(self, store: Store, without: Sequence[str], is_old: Callable[[int], bool]) -> None:
        self._store = store
        self._without = [root.strip("/") for root in without]
        self._is_old = is_old
        self.unexcused: list[Damage] = []
        self.excused: list[Damage] = []

    def note(self, each: Damage) -> bool:
        """Note a record. Return whether the user excused it."""
        excused = any(keys.is_at_or_below(each.path, root) for root in self._without)
        (self.excused if excused else self.unexcused).append(each)
        return excused

    def vanished(self, path: str, key: str, why: str) -> bool:
        """Note a record that has vanished. Return whether the user excused it."""
        problem = f"{self._store.where(path)} has vanished without a tombstone: {why}"
        return self.note(Damage(path, key, VANISHED, problem))

    def list_records(self, prefix: str = keys.TREE) -> Iterator[ObjectInfo]:
        """List all records. If the endpoint ends the listing early, that is noted, because it may omit others, too."""
        objects, last = self._store.objects, prefix
        for item in objects_below(objects, prefix):
            last = max(last, item.key)
            yield item
        while more := objects.list_after(prefix, last):
            omitted = [item.key for item in more if self._is_old(item.modified_ns)]  # the others may be new
            if omitted:
                problem = f"{self._store.where(prefix)}: the endpoint ended a listing before {omitted[0]}"
                self.note(Damage("", prefix, StoreError.kind, problem))
            yield from more
            last = max(item.key for item in more)

    def check_lists(self, lists: Iterable[ObjectInfo]) -> None:
        """Note the checkpoints of these reference lists, which have no metadata and no tombstone of it."""
        for directory in vanished_checkpoints(self._store, lists):
            path = keys.inside(directory, ROOT)
            self.vanished(path, keys.record_key(path), "a reference list names its checkpoint")

    def check_count(self, found: int, at_least: int) -> None:
        """Note that fewer records were listed than the last gc left. Any path that the user excuses excuses that."""
        if found < at_least:
            problem = (
                f"{self._store.where(keys.TREE)}: {at_least - found} fewer records are listed than the last gc left"
            )
            (self.excused if self._without else self.unexcused).append(Damage("", keys.TREE, VANISHED, problem))
