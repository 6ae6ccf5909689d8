"""The options of a garbage collection, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tierfs.store.maintenance.gc.mark import Unreadable

__all__ = ["GcOptions", "GcReport", "Tally"]


@dataclass(slots=True)
class Tally:
    """A number of objects, and their bytes."""

    count: int = 0
    bytes: int = 0

    def add(self, count: int, size: int) -> None:
        """Count more."""
        self.count += count
        self.bytes += size


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How to collect.

    Attributes:
        dry_run: Change nothing, and say what would be done, by this host's clock.
        exclusive: Nobody else writes to the store, its user says: delete at once what nothing reaches.
        without: Paths; records at or below them that cannot be read are taken for such as need nothing.
        concurrency: Requests under way at once.
        deletes_per_s: At most.
        batch: Chunk objects that are deleted with one request.
    """

    dry_run: bool = False
    exclusive: bool = False
    without: Sequence[str] = ()
    concurrency: int = 16
    deletes_per_s: float = 3000.0
    batch: int = 1000


@dataclass(slots=True)
class GcReport:
    """What a run found and did; a dry run, what it would have done.

    Attributes:
        dry_run: Whether nothing was changed.
        files: Live records.
        by_list: Of those, the ones that a reference list speaks for: they were not read.
        made_lists: Reference lists that were made again.
        reached: Chunk objects that something needs.
        deleted: Chunk objects that were condemned a grace ago and are unreached still.
        condemned: Those that this run found unreached.
        waiting: Those that were condemned, and wait until a grace has passed.
        young: Those that are unreached and younger than a grace.
        tombstones, leases, probes, lists, references: What was tidied up: expired ones of each. The last are reference lists.
        unreadable: Records that cannot be read. If there are any nothing was condemned or deleted.
        passed_over: Those that were to be done without.
        next_s: In how many seconds another run can delete what is condemned now; ``None`` if there is nothing.
    """

    dry_run: bool = False
    files: int = 0
    by_list: int = 0
    made_lists: int = 0
    reached: Tally = field(default_factory=Tally)
    deleted: Tally = field(default_factory=Tally)
    condemned: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    young: Tally = field(default_factory=Tally)
    tombstones: Tally = field(default_factory=Tally)
    leases: Tally = field(default_factory=Tally)
    probes: Tally = field(default_factory=Tally)
    lists: Tally = field(default_factory=Tally)
    references: Tally = field(default_factory=Tally)
    unreadable: list[Unreadable] = field(default_factory=list)
    passed_over: list[Unreadable] = field(default_factory=list)
    next_s: int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether nothing was collected because a record cannot be read."""
        return bool(self.unreadable)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "blocked": self.is_blocked}
