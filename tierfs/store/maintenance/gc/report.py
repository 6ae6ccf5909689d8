"""The options of a garbage collection, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tierfs.store.maintenance.examine import Damage


@dataclass(slots=True)
class Tally:
    """A number of objects, and their total bytes."""

    count: int = 0
    bytes: int = 0

    def add(self, count: int, size: int) -> None:
        """Add to both."""
        self.count += count
        self.bytes += size


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How to collect.

    Attributes:
        dry_run: Change nothing, and report what a run would do, by this host's clock.
        exclusive: The user guarantees that no other process writes to the store: delete unreached chunks at once.
        reencode: First encode chunks that were sent raw under pressure: see `tierfs.store.maintenance.reencode`.
        without: Paths. An unreadable or vanished record at or below one of them counts as reaching nothing.
        concurrency: Most requests in flight.
        deletes_per_s: Most chunk objects deleted per second.
        batch: Chunk objects deleted per request.
    """

    dry_run: bool = False
    exclusive: bool = False
    reencode: bool = False
    without: Sequence[str] = ()
    concurrency: int = 16
    deletes_per_s: float = 3000.0
    batch: int = 1000


@dataclass(slots=True)
class GcReport:
    """The findings and actions of a run; of a dry run, those that a run would have.

    Attributes:
        dry_run: Whether nothing was changed.
        files: Live records.
        by_list: Live records that a reference list covers; the run did not read them.
        made_lists: Reference lists that were rebuilt.
        reached: Chunk objects that a record needs.
        missing: Chunk objects that a record needs and that do not exist.
        deleted: Chunk objects that were condemned at least a grace ago and are still unreached.
        condemned: Chunk objects that this run found unreached.
        waiting: Condemned chunk objects that wait until a grace has passed.
        young: Unreached chunk objects younger than a grace.
        tombstones, leases, probes, lists, references: Expired objects of each kind that were removed. Records of
            peers count as leases.
            ``lists`` are condemned lists, ``references`` are reference lists.
        replaced: Shard files that no save has named for a grace, which were deleted. Bytes are their lengths.
        unfinished: Other shard files that no checkpoint names: their save is under way, did not finish, or was replaced
            less than a grace ago.
        reencoded: Chunks that were encoded, and the bytes that this saves once their raw objects are deleted.
        unreadable: Unreadable and vanished records. If there are any, nothing was condemned or deleted.
        passed_over: Unreadable and vanished records that `GcOptions.without` excused.
        next_s: Seconds until another run can delete the chunks that are condemned now; ``None`` if there are none.
    """

    dry_run: bool = False
    files: int = 0
    by_list: int = 0
    made_lists: int = 0
    reached: Tally = field(default_factory=Tally)
    missing: int = 0
    deleted: Tally = field(default_factory=Tally)
    condemned: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    young: Tally = field(default_factory=Tally)
    tombstones: Tally = field(default_factory=Tally)
    leases: Tally = field(default_factory=Tally)
    probes: Tally = field(default_factory=Tally)
    lists: Tally = field(default_factory=Tally)
    references: Tally = field(default_factory=Tally)
    replaced: Tally = field(default_factory=Tally)
    unfinished: Tally = field(default_factory=Tally)
    reencoded: Tally = field(default_factory=Tally)
    unreadable: list[Damage] = field(default_factory=list)
    passed_over: list[Damage] = field(default_factory=list)
    next_s: int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether an unreadable or vanished record kept the run from collecting anything."""
        return bool(self.unreadable)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "blocked": self.is_blocked}
