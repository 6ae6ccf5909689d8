"""Scrubbing: verify every chunk object over the years, the least recently verified first, and heal damaged ones.

Work is cut into pieces: some gigabytes of the chunk objects of one prefix. A piece depends only on its arguments, so
any `concurrent.futures.Executor` can run it on any machine, and run it again. Prefixes take turns, and each is read in
the order of its keys. So the next object is always the one that was verified longest ago. New objects are the
exception: they wait for the turn of their prefix.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    FormatError,
    NotFoundError,
    ReadOnlyError,
)
from tierfs.format import keys
from tierfs.format.upkeep import SCRUB_BYTES_MAX, PrefixState, ScrubRecord
from tierfs.objects.checksums import put_checked, read_decoded
from tierfs.objects.protocol import CREATE, Update
from tierfs.store.maintenance.examine import Damage
from tierfs.store.maintenance.gc.mark import mark
from tierfs.store.maintenance.gc.sweep import PREFIXES, list_prefixes
from tierfs.store.maintenance.scrub_piece import PIECE_S, ScrubDamage, ScrubPart, ScrubPiece, scrub_piece
from tierfs.store.store import Store
from tierfs.threads import Pool

DAMAGED_MAX = 10_000
ATTEMPTS = 5
PIECES_AT_ONCE = 4
SAVE_S = 5.0
CLOCKS_APART_NS = 3600 * 1_000_000_000  # difference of two hosts' clocks that is not a fault
_logger = logging.getLogger("tierfs.scrub")


@dataclass(frozen=True, slots=True)
class ScrubOptions:
    """How to scrub.

    Attributes:
        max_seconds: Start no piece after this time; ``None`` for one round over everything.
        bandwidth: Bytes of objects per second at most, for all workers together; ``None`` for no limit.
        concurrency: Objects in flight per worker.
        heal: Whether to restore the right bytes.
        min_age_s: Skip prefixes whose last round ended less than this long ago.
        dry_run: Put nothing: heal nothing, and do not save the progress.
        look_age_s: Compare the records with the listing of chunks at the end, if the last comparison on any host is at
            least this old. None for no comparison.
    """

    max_seconds: float | None = None
    bandwidth: float | None = None
    concurrency: int = 8
    heal: bool = True
    min_age_s: float = 0.0
    dry_run: bool = False
    look_age_s: float | None = 0.0


@dataclass(slots=True)
class ScrubReport:
    """The result of a run.

    Attributes:
        chunks: Chunk objects that were read.
        bytes: Bytes of these objects.
        prefixes_done: How many of the 256 prefixes ended a round in this run.
        seconds: Duration of the run.
        damage: Damage that this run found.
        known: Objects that earlier runs found damaged, and that this run did not check again.
        oldest_ns: When the prefix that comes next was verified; 0 if it never was.
        missing: Chunk objects that a record needs and that do not exist, when the records were last compared.
        unreadable: Records that this run could not read. The chunks that they need are not compared.
    """

    chunks: int = 0
    bytes: int = 0
    prefixes_done: int = 0
    seconds: float = 0.0
    damage: list[ScrubDamage] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    oldest_ns: int = 0
    missing: int = 0
    unreadable: list[Damage] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no damage is known to be left."""
        return not (self.known or self.missing or self.unreadable) and all(each.healed for each in self.damage)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.is_sound}


RunPiece = Callable[[ScrubPiece], ScrubPart]


def scrub(
    store: Store,
    options: ScrubOptions | None = None,
    *,
    replicas: Sequence[Store] = (),
    executor: Executor | None = None,
    workers: int = 1,
    run_piece: RunPiece | None = None,
    progress: Callable[[int], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> ScrubReport:
    """Verify chunk objects of the object tier, and heal damaged ones.

    Args:
        store: The store. Healing looks in its local tiers first.
        replicas: Other stores that may hold the same content.
        executor: Runs the pieces; by default threads of this process do.
        workers: How many pieces the executor runs at once.
        run_piece: The function that the executor runs. In another process it has to open the store itself.
        progress: Called with the number of bytes verified.
        stop: Set to start no further piece.

    Raises:
        StoreError, ReadOnlyError: The object tier failed. The progress before that is saved.
    """
    options = options or ScrubOptions()
    run = run_piece or (lambda piece: scrub_piece(store, piece, replicas=replicas, progress=progress))
    note = progress if run_piece else lambda _: None
    if executor is not None:
        return _Round(store, options, run, executor, workers, note, stop).run()
    # A small store has few objects per prefix: several prefixes at once keep the threads busy.
    workers = 1 if run_piece else min(PIECES_AT_ONCE, options.concurrency)
    options = replace(options, concurrency=options.concurrency // workers)
    with ThreadPoolExecutor(workers, thread_name_prefix="tierfs-scrub") as threads:
        return _Round(store, options, run, threads, workers, note, stop).run()


class _Round:
    """The state of one run."""

    def __init__(
        self,
        store: Store,
        options: ScrubOptions,
        run: RunPiece,
        executor: Executor,
        workers: int,
        progress: Callable[[int], object],
        stop: threading.Event | None,
    ) -> None:
        self._store = store.without_local_tiers()
        self._options = options
        self._run = run
        self._executor = executor
        self._workers = workers
        self._progress = progress
        self._stop = stop or threading.Event()
        self._report = ScrubReport()
        self._begun = self._saved = self._store.clock.monotonic()
        self._has_succeeded = False
        self._looked_ns = 0
        self._unsaved: list[Callable[[ScrubRecord], ScrubRecord]] = []

    def run(self) -> ScrubReport:
        clock, report = self._store.clock, self._report
        record = read_scrub_record(self._store)
        states = {prefix: record.prefixes.get(prefix, PrefixState()) for prefix in PREFIXES}
        now_ns, age_ns = clock.now_ns(), int(self._options.min_age_s * 1e9)
        # A time in the future comes from a host whose clock was wrong. It does not count.
        recent = range(now_ns - age_ns + 1, now_ns + CLOCKS_APART_NS + 1) if age_ns else range(0)
        due = [prefix for prefix in PREFIXES if states[prefix].verified_ns not in recent]
        turns = iter(sorted(due, key=lambda prefix: (states[prefix].verified_ns, not states[prefix].after, prefix)))
        again: list[ScrubPiece] = []
        pending: dict[Future[ScrubPart], ScrubPiece] = {}
        try:
            while True:
                while len(pending) < self._workers and not self._is_over():
                    piece = (
                        again.pop() if again else next((self._piece(name, states[name].after) for name in turns), None)
                    )
                    if piece is None:
                        break
                    pending[self._executor.submit(self._run, piece)] = piece
                if not pending:
                    break
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    del pending[future]
                    part = future.result()
                    self._note(part)
                    if part.after:
                        again.append(self._piece(part.prefix, part.after))
            report.missing = record.last.get("missing", 0)
            if self._looks(record.last):
                self._look()
            self._has_succeeded = True
        finally:
            for future in pending:
                future.cancel()
            report.seconds = clock.monotonic() - self._begun
            if report.chunks or report.prefixes_done or self._looked_ns:
                self._unsaved.append(lambda record: replace(record, last=self._last(record.last)))
            record = self._save() if self._unsaved else record
        found = {each.key for each in report.damage}
        report.known = {key: problem for key, problem in record.damaged.items() if key not in found}
        report.oldest_ns = min(record.prefixes.get(prefix, PrefixState()).verified_ns for prefix in PREFIXES)
        return report

    def _looks(self, last: Mapping[str, Any]) -> bool:
        """Return whether to compare the records with the listing of chunks."""
        age_s = self._options.look_age_s
        if age_s is None or self._stop.is_set():
            return False
        passed_ns = self._store.clock.now_ns() - int(last.get("looked_ns", 0))
        return passed_ns >= age_s * 1e9 or passed_ns < -CLOCKS_APART_NS

    def _look(self) -> None:
        """Count the chunk objects that records need and that do not exist. `repair` names them."""
        self._looked_ns = self._store.clock.now_ns()
        with Pool(self._options.concurrency) as pool:
            marked = mark(self._store, pool)
            found = list_prefixes(self._store, pool)
            self._report.missing = sum(marked.reached.missing_from(each.number, each.names) for each in found)
        self._report.unreadable = marked.losses.unexcused

    def _piece(self, prefix: str, after: str) -> ScrubPiece:
        options = self._options
        seconds = PIECE_S
        if options.max_seconds is not None:
            seconds = min(seconds, max(0.0, options.max_seconds - (self._store.clock.monotonic() - self._begun)))
        bandwidth = None if options.bandwidth is None else options.bandwidth / self._workers
        heals = options.heal and not options.dry_run
        return ScrubPiece(prefix, after, seconds, bandwidth, options.concurrency, heals)

    def _is_over(self) -> bool:
        elapsed = self._store.clock.monotonic() - self._begun
        return self._stop.is_set() or (self._options.max_seconds is not None and elapsed >= self._options.max_seconds)

    def _note(self, part: ScrubPart) -> None:
        report = self._report
        report.chunks += part.chunks
        report.bytes += part.bytes
        report.damage += part.damage
        report.prefixes_done += not part.after
        self._progress(part.bytes)
        now_ns = self._store.clock.now_ns()

        def changed(record: ScrubRecord) -> ScrubRecord:
            before = record.prefixes.get(part.prefix, PrefixState())
            state = PrefixState(before.verified_ns, part.after) if part.after else PrefixState(now_ns)
            low, high = part.keys
            start = f"{keys.CHUNKS}{part.prefix}/"
            kept = {
                key: problem
                for key, problem in record.damaged.items()
                if not (key.startswith(start) and low < key <= high)
            }
            kept |= {each.key: each.problem for each in part.damage if not each.healed}
            kept = dict(itertools.islice(kept.items(), DAMAGED_MAX))
            return replace(record, prefixes={**record.prefixes, part.prefix: state}, damaged=kept)

        self._unsaved.append(changed)
        if not self._options.dry_run and self._store.clock.monotonic() >= self._saved + SAVE_S:
            self._save()

    def _last(self, before: Mapping[str, Any]) -> dict[str, Any]:
        report, now_ns = self._report, self._store.clock.now_ns()
        looked = {name: before.get(name, 0) for name in ("succeeded_ns", "looked_ns", "missing", "vanished")}
        if self._has_succeeded:
            looked["succeeded_ns"] = now_ns
        if self._looked_ns:
            vanished = sum(each.kind == "vanished" for each in report.unreadable)
            looked |= {"looked_ns": self._looked_ns, "missing": report.missing, "vanished": vanished}
        if not (report.chunks or report.prefixes_done):
            return {**before, **looked}
        healed = sum(1 for each in report.damage if each.healed)
        return {
            "ended_ns": now_ns,
            "seconds": round(report.seconds, 3),
            "chunks": report.chunks,
            "bytes": report.bytes,
            "damaged": len(report.damage) - healed,
            "healed": healed,
            **looked,
        }

    def _save(self) -> ScrubRecord:
        """Save the progress, merged with the notes of concurrent runs. The record is advisory, so this may fail."""
        store = self._store
        changes, self._unsaved = self._unsaved, []
        self._saved = store.clock.monotonic()
        record = ScrubRecord()
        for _ in range(ATTEMPTS):
            record, version = _read(store)
            for change in changes:
                record = change(record)
            if self._options.dry_run:
                break
            mode = CREATE if version is None else Update(version)
            try:
                put_checked(store.objects, keys.SCRUB, [record.encode()], mode=mode)
            except (AlreadyExistsError, ConflictError):
                continue
            except (ReadOnlyError, CapacityError) as error:
                _logger.warning("the progress of scrubbing cannot be saved: %s", error)
            break
        return record


def read_scrub_record(store: Store) -> ScrubRecord:
    """Return the scrub record; an empty one if it is missing or unreadable.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    return _read(store)[0]


def _read(store: Store) -> tuple[ScrubRecord, Any]:
    where = store.where(keys.SCRUB)
    try:
        record, info, _ = read_decoded(store.objects, keys.SCRUB, SCRUB_BYTES_MAX, ScrubRecord.decode, where)
    except NotFoundError:
        return ScrubRecord(), None
    except (CorruptionError, FormatError) as error:
        _logger.warning("the scrub record is unreadable and is created again: %s", error)
        return ScrubRecord(), store.objects.head(keys.SCRUB).version
    return record, info.version
