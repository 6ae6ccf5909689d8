"""Run garbage collection: one mark, then delete chunks condemned at least a grace ago, and condemn unreached ones.

docs/decisions/0056 has the protocol and its proof. FORMAT.md, "Leases and condemned chunks", has the rules for writers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, replace

from tierfs.errors import ConflictError, CorruptionError, FormatError, InvalidInputError, NotFoundError
from tierfs.format import keys
from tierfs.format.lease import CONDEMNED_MAX, Condemned, Lease, NameTable
from tierfs.format.upkeep import EpochState, record_check
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.protocol import CREATE, ObjectInfo, objects_below
from tierfs.store.maintenance.gc.mark import ListedShard, Marked, mark
from tierfs.store.maintenance.gc.report import GcOptions, GcReport, Tally
from tierfs.store.maintenance.gc.sweep import CondemnedLists, list_prefixes, read_lists, sort_prefix
from tierfs.store.maintenance.gc_turn import MARGIN_NS, SECOND_NS, Turn, epoch_of, read_collector
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed
from tierfs.store.tree.references import root_list
from tierfs.store.write.staging import bury
from tierfs.threads import Pool

LISTS_MAX = 1000
UNNAMED_MAX = 5000  # so that they take a third of the collector's record
PROBE_AGE_S = 3600
_logger = logging.getLogger("tierfs.gc")


Progress = Callable[[str, int], object]


def collect(store: Store, options: GcOptions | None = None, progress: Progress = lambda *_: None) -> GcReport:
    """Collect garbage once.

    Args:
        store: The store.
        options: How to collect.
        progress: Called with the name of a counter and its increase.

    Raises:
        ConflictError: Another gc is running; or ``exclusive`` is set, and a writer has a live lease.
        InvalidInputError: The store can only be collected with ``exclusive``.
        StoreError, ReadOnlyError, CapacityError: The object tier failed, or answers with old metadata. The next run
            does the rest.
    """
    options = options or GcOptions()
    if store.descriptor.single_writer and not (options.exclusive or options.dry_run):
        raise InvalidInputError(
            f"{store.url} is a single-writer store, because its endpoint cannot promise "
            f"{', '.join(store.descriptor.endpoint.missing)}: make sure that no process writes, and use --exclusive",
            path=store.url,
        )
    reencoded = Tally()
    if options.reencode:
        from tierfs.store.maintenance.reencode import reencode  # noqa: PLC0415 - it loads NumPy

        reencoded = reencode(store, exclusive=options.exclusive, dry_run=options.dry_run, progress=progress)
    with Pool(options.concurrency) as pool:
        return _Collection(store.without_local_tiers(), options, pool, progress, reencoded).run()


class _Collection:
    """The state of one run."""

    def __init__(self, store: Store, options: GcOptions, pool: Pool, progress: Progress, reencoded: Tally) -> None:
        self._store = store
        self._options = options
        self._pool = pool
        self._progress = progress
        self._width = keys.name_bytes(store.descriptor.digest_kind)
        self._turn = Turn(store)
        self._report = GcReport(dry_run=options.dry_run, reencoded=reencoded)
        self._touched: set[int] = set()  # epochs of the lists whose chunks this run deleted
        self._published: list[int] = []
        self._doomed = bytearray()
        self._started = store.clock.monotonic()
        self._records = 0  # how many records the next gc lists at least
        self._sent_from = 0.0
        self._sent = 0

    def run(self) -> GcReport:
        turn, store = self._turn, self._store
        if self._options.dry_run:
            self._begin_dry()
        else:
            turn.begin()
        try:
            self._begun_ns = turn.now_ns  # the mark reads no state that is older
            self._records = turn.record.last.get("records", 0)  # a blocked run leaves it
            interval_ns = self._check_leases()
            epochs = dict(turn.record.epochs)
            # With `exclusive`, no writer has a live lease. A writer that begins now reads these lists first.
            is_ripe_at_once = self._options.exclusive
            ripe = {
                epoch: is_ripe_at_once or self._is_over(state.seen_ns, interval_ns) for epoch, state in epochs.items()
            }
            lists = read_lists(store, ripe)
            marked, report = self._mark(), self._report
            if self._buries_at_once and marked.replaced and not marked.losses.unexcused:
                self._bury(marked.replaced)
                marked = self._mark({path for path, _, _ in marked.replaced} if self._options.dry_run else frozenset())
            report.files, report.by_list, report.made_lists = marked.files, marked.by_list, marked.made_lists
            report.unreadable, report.passed_over = marked.losses.unexcused, marked.losses.excused
            if not report.unreadable:
                self._sweep(marked, lists)
                self._publish()
                if self._options.exclusive:
                    self._delete_published()
                self._finish(epochs, ripe, lists, interval_ns)
                self._tidy(marked)
            self._note_last()
        finally:
            if not self._options.dry_run:
                turn.end()
        return self._report

    def _mark(self, ignored: Container[str] = frozenset()) -> Marked:
        """Mark what the records need, but not what those at the ``ignored`` paths need."""
        return mark(
            self._store,
            self._pool,
            without=self._options.without,
            remake=not self._options.dry_run,
            records_min=self._records,
            is_old=self._is_old,
            ignored=ignored,
            alive=self._hold,
            progress=self._progress,
        )

    def _begin_dry(self) -> None:
        turn, store = self._turn, self._store
        turn.now_ns = store.clock.now_ns()  # reading the object tier's time takes a put
        record, _ = read_collector(store)
        listed = [item.key for item in objects_below(store.objects, keys.GC) if keys.is_condemned_key(item.key)]
        epochs = {epoch: record.epochs.get(epoch, EpochState(turn.now_ns)) for epoch in map(epoch_of, listed)}
        turn.note(epochs, record.last, unnamed=record.unnamed)

    def _hold(self) -> None:
        if not self._options.dry_run:
            self._turn.hold()

    def _is_over(self, since_ns: int, for_ns: int) -> bool:
        """Return whether at least this time has certainly passed from ``since_ns`` to the beginning of this run.

        ``since_ns`` is the object tier's time.
        """
        return self._begun_ns - since_ns >= for_ns + MARGIN_NS

    @property
    def _grace_ns(self) -> int:
        return self._store.descriptor.grace_s * SECOND_NS

    # -- leases --------------------------------------------------------------------------------------------------------

    def _check_leases(self) -> int:
        """Return for how many nanoseconds condemned chunks wait: a grace, or twice the longest lease if that is longer.

        Raises:
            ConflictError: ``exclusive`` is set, and a writer has a live lease.
        """
        longest_s = self._store.descriptor.lease_s
        for info in self._leases():
            try:
                where = self._store.where(info.key)
                duration_s = read_decoded(self._store.objects, info.key, 4096, Lease.decode, where)[0].duration_s
            except NotFoundError:
                continue
            except (CorruptionError, FormatError) as error:
                _logger.warning("a lease cannot be read; gc assumes that it has the longest duration: %s", error)
                duration_s = 3600
            if self._options.exclusive and not self._is_over(info.modified_ns, duration_s * SECOND_NS):
                raise ConflictError(
                    f"{self._store.url}: {info.key} is the live lease of a writer: gc --exclusive requires "
                    "that no process writes; nothing was deleted",
                    path=info.key,
                )
            longest_s = max(longest_s, duration_s)
        return max(self._grace_ns, 2 * longest_s * SECOND_NS)

    def _leases(self) -> list[ObjectInfo]:
        return list(objects_below(self._store.objects, keys.LEASES))

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _sweep(self, marked: Marked, lists: CondemnedLists) -> None:
        report = self._report
        for prefix in list_prefixes(self._store, self._pool):
            dead, doomed = sort_prefix(prefix, marked.reached, lists, report, width=self._width, is_old=self._is_old)
            report.missing += marked.reached.missing_from(prefix.number, prefix.names)
            self._delete(dead)
            self._condemn(doomed)
            self._progress("prefixes", 1)

    def _is_old(self, time_ns: int) -> bool:
        return self._options.exclusive or self._is_over(time_ns, self._grace_ns)

    def _delete(self, dead: Sequence[tuple[bytes, int, int]]) -> None:
        """Delete chunk objects in batches at a bounded rate. Confirm the turn right before each batch."""
        for start in range(0, len(dead), self._options.batch):
            batch = dead[start : start + self._options.batch]
            if not self._options.dry_run:
                self._pace(len(batch))
                self._turn.hold()
                self._store.objects.delete([keys.chunk_key(keys.ChunkName.decode(name)) for name, _, _ in batch])
                self._touched |= {epoch for _, _, epoch in batch}
            size = sum(size for _, size, _ in batch)
            self._report.deleted.add(len(batch), size)
            self._progress("deleted", len(batch))

    def _pace(self, count: int) -> None:
        clock = self._store.clock
        if not self._sent:
            self._sent_from = clock.monotonic()
        wait_s = self._sent_from + self._sent / self._options.deletes_per_s - clock.monotonic()
        if wait_s > 0:
            clock.sleep(wait_s)
        self._sent += count

    def _condemn(self, doomed: Sequence[tuple[bytes, int]]) -> None:
        self._report.condemned.add(len(doomed), sum(size for _, size in doomed))
        if self._options.dry_run:
            return
        for name, _ in doomed:
            self._doomed += name
            if len(self._doomed) == CONDEMNED_MAX * self._width:
                self._publish()

    def _publish(self) -> None:
        """Publish the unreached chunks. Writers treat them as absent from their next renewal on."""
        if not self._doomed:
            return
        if len(self._turn.record.epochs) + len(self._published) >= LISTS_MAX:
            _logger.warning(
                "%s: the limit of %d condemned lists is reached: this gc condemns no more chunks",
                self._store.url,
                LISTS_MAX,
            )
            self._doomed.clear()
            return
        self._turn.hold()
        store, kind = self._store, self._store.descriptor.digest_kind
        epoch = self._turn.epoch(len(self._published))
        listed = Condemned(epoch, store.clock.now_ns(), kind, NameTable(kind, bytes(self._doomed)))
        put_idempotent(store.objects, keys.condemned_key(epoch), listed.encode(), mode=CREATE)
        self._published.append(epoch)
        self._doomed.clear()

    def _delete_published(self) -> None:
        """With ``exclusive``: delete the chunks that were just condemned, unless a writer has a live lease."""
        deleted, condemned = self._report.deleted, self._report.condemned
        self._report.condemned = Tally()
        if self._options.dry_run:
            deleted.add(condemned.count, condemned.bytes)
            return
        self._turn.renew()
        self._begun_ns = self._turn.now_ns
        self._check_leases()
        lists = read_lists(self._store, dict.fromkeys(self._published, True))
        for prefix in range(256):
            self._delete([(name, 0, epoch) for name, epoch in lists.ripe(prefix).items()])
        deleted.bytes += condemned.bytes

    def _finish(
        self, epochs: dict[int, EpochState], ripe: dict[int, bool], lists: CondemnedLists, interval_ns: int
    ) -> None:
        """Note the state of each list, and remove the lists whose last deletion is at least a grace old."""
        if self._options.dry_run:
            return
        now_ns = self._turn.renew()  # all published lists and deletions were acknowledged before this time
        states = {epoch: EpochState(now_ns) for epoch in self._published}
        if self._options.exclusive:
            states = {epoch: EpochState(now_ns, now_ns) for epoch in self._published}
        spent = []
        for epoch, state in epochs.items():
            is_done = state.swept_ns is None and (ripe[epoch] or epoch in lists.damaged)
            new = replace(state, swept_ns=now_ns) if is_done or epoch in self._touched else state
            if new.swept_ns is not None and self._is_over(new.swept_ns, self._grace_ns):
                spent.append(epoch)
            else:
                states[epoch] = new
        self._turn.note(states, self._turn.record.last)
        self._turn.hold()
        self._remove_lists(spent)
        waits = [state.seen_ns for epoch, state in states.items() if state.swept_ns is None]
        if waits:
            self._report.next_s = max(0, (min(waits) + interval_ns + MARGIN_NS - now_ns) // SECOND_NS) + 1

    def _remove_lists(self, spent: Iterable[int]) -> None:
        found = [keys.condemned_key(epoch) for epoch in spent]
        if found:
            self._store.objects.delete(found)
            self._report.lists.add(len(found), 0)

    # -- other leftovers -----------------------------------------------------------------------------------------------

    def _tidy(self, marked: Marked) -> None:
        """Remove expired tombstones, leases, peer records, probes and reference lists, if they have not changed."""
        grace_ns, lease_ns = self._grace_ns, self._store.descriptor.lease_s * SECOND_NS
        # A checkpoint's list goes before the tombstone of its metadata: otherwise it would seem to have vanished.
        kept = self._remove(marked.stale_lists, self._report.references)
        over = (item for item in marked.tombstones if self._is_over(item.modified_ns, grace_ns))
        old = [item for item in over if root_list(item.key) not in kept]
        self._records = marked.records - len(old)
        if old and not self._options.dry_run:
            # If this gc is killed while it removes them, the next one does not take them for lost.
            self._turn.note(self._turn.record.epochs, {**self._turn.record.last, "records": self._records})
            self._turn.renew()
        self._remove(old, self._report.tombstones)
        peers = objects_below(self._store.objects, keys.PEERS)
        renewed = [*self._leases(), *peers]
        leases = [item for item in renewed if self._is_over(item.modified_ns, lease_ns + grace_ns)]
        self._remove(leases, self._report.leases)
        listed = objects_below(self._store.objects, keys.PROBE)
        probes = [item for item in listed if self._is_over(item.modified_ns, PROBE_AGE_S * SECOND_NS)]
        self._remove(probes, self._report.probes)
        if not self._buries_at_once:
            self._bury(marked.replaced)
        for _, _, length in marked.unfinished:
            self._report.unfinished.add(1, length)

    @property
    def _buries_at_once(self) -> bool:
        """Whether replaced shard files go at once. Re-encoded metadata is younger than files of a save under way."""
        return self._options.exclusive and not self._options.reencode

    def _bury(self, parts: Sequence[ListedShard]) -> None:
        """Delete the shard files that a gc saw unnamed a grace ago. Their chunks are unreached from the next mark on."""
        turn, seen = self._turn, {}
        for path, info, length in parts if self._buries_at_once else parts[:UNNAMED_MAX]:
            check = record_check(info.key, info.version).hex()
            seen_ns = turn.record.unnamed.get(check, self._begun_ns)
            if not (self._buries_at_once or self._is_over(seen_ns, self._grace_ns)):
                seen[check] = seen_ns
                self._report.unfinished.add(1, length)
                continue
            self._hold()
            with contextlib.suppress(ConflictError):  # another process changed or removed it
                if not self._options.dry_run:
                    bury(self._store, Observed(path, info.key, None, info.version))
                self._report.replaced.add(1, length)
        turn.note(turn.record.epochs, turn.record.last, unnamed=seen)

    def _remove(self, items: Sequence[ObjectInfo], tally: Tally) -> set[str]:
        """Remove objects that have not changed. Return the keys of the others."""
        changed = set()

        def remove(item: ObjectInfo) -> int | None:
            try:
                if not self._options.dry_run:
                    self._store.objects.delete_version(item.key, item.version)
            except NotFoundError:
                return None
            except ConflictError:
                changed.add(item.key)
                return None
            return item.size

        for start in range(0, len(items), self._options.batch):
            self._hold()
            for size in self._pool.map(remove, items[start : start + self._options.batch]):
                if size is not None:
                    tally.add(1, size)
        return changed

    def _note_last(self) -> None:
        """Note the result that `status` shows until the next run."""
        report = self._report
        if self._options.dry_run:
            return
        before = self._turn.record.last
        last = {
            "ended_ns": self._turn.now_ns,
            "succeeded_ns": before.get("succeeded_ns", 0) if report.is_blocked else self._turn.now_ns,
            "seconds": round(self._store.clock.monotonic() - self._started, 3),
            "missing": before.get("missing", 0) if report.is_blocked else report.missing,
            "vanished": sum(each.kind == "vanished" for each in report.unreadable),
            "files": report.files,
            "records": self._records,
            "unreadable": [each.path or each.key for each in report.unreadable[:10]],
            "unreadable_count": len(report.unreadable),
            "without": list(self._options.without),
            **{
                name: asdict(getattr(report, name))
                for name in ("reached", "deleted", "condemned", "waiting", "young", "reencoded")
            },
        }
        self._turn.note(self._turn.record.epochs, last)
