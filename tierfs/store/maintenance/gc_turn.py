"""The turn to collect garbage: a conditional lease lets one gc run at a time.

FORMAT.md, "Collector". gc only compares times that the object tier gave in its responses to puts of one object, the
collector's record. The clock of gc's own host only measures how long this process may rely on its turn.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.upkeep import COLLECTOR_BYTES_MAX, NOBODY, Collector, EpochState
from tierfs.objects.checksums import put_checked, put_idempotent, read_decoded
from tierfs.objects.protocol import CREATE, PutMode, Update, Version, objects_below
from tierfs.store.store import Store

SECOND_NS = 1_000_000_000
MARGIN_NS = 2 * SECOND_NS
"""Object tiers report times in whole seconds, and their machines' clocks differ slightly."""
PART_BITS = 16
_logger = logging.getLogger("tierfs.gc")


class Turn:
    """The right of one gc to publish condemned lists and to delete chunks. For one thread.

    Attributes:
        now_ns: The object tier's time of the last put of the record. The current time is not earlier.
        record: The record as this gc last put it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._version: Version | None = None
        self._valid_until = self._renew_at = float("-inf")
        self.now_ns = 0
        self.record = Collector()

    def begin(self) -> None:
        """Take the turn.

        Raises:
            ConflictError: Another gc has the turn.
            StoreError: The object tier failed, or it answers with metadata older than the last put.
        """
        store = self._store
        found, version = read_collector(store)
        epochs = [epoch_of(one.key) for one in objects_below(store.objects, keys.GC) if keys.is_condemned_key(one.key)]
        if found.holder != NOBODY:
            self._check_is_over(found)
        # A new record must not start from 1 again: an epoch is never used twice.
        floor = found.fence if version is not None and found.sequence else store.clock.now_ns() // SECOND_NS
        fence = max([floor, *(epoch >> PART_BITS for epoch in epochs)]) + 1
        known = {epoch: state for epoch, state in found.epochs.items() if epoch in set(epochs)}
        self.record = replace(
            found,
            holder=store.random_bytes(16),
            fence=fence,
            sequence=0,
            duration_s=store.descriptor.lease_s,
            epochs=known,
        )
        self._version = version
        self._put()
        self._check_is_fresh()
        # If a gc put a list right before it ended, the list counts as seen from now on: from now on all writers see it.
        self.note(
            {**known, **{epoch: EpochState(self.now_ns) for epoch in epochs if epoch not in known}}, self.record.last
        )

    def hold(self) -> None:
        """Renew the turn if it is due. Call it right before an action that only one gc may take.

        Raises:
            ConflictError: Another gc has taken over.
            StoreError: The object tier failed, so the turn cannot be confirmed.
        """
        if self._store.clock.monotonic() >= self._renew_at:
            self._put()

    def renew(self) -> int:
        """Put the record, and return the object tier's time of the put."""
        self._put()
        return self.now_ns

    def note(self, epochs: Mapping[int, EpochState], last: Mapping[str, Any], **others: Any) -> None:
        """Change the record's notes; the next renewal puts them."""
        self.record = replace(self.record, epochs=dict(epochs), last=dict(last), **others)

    def epoch(self, part: int) -> int:
        """Return the epoch of a condemned list of this gc."""
        assert part < 1 << PART_BITS
        return self.record.fence << PART_BITS | part

    def end(self) -> None:
        """End the turn, and put the notes. Does nothing if another gc has taken over."""
        if self._version is None:
            return
        self.record = replace(self.record, holder=NOBODY)
        with contextlib.suppress(ConflictError):
            self._put()
        self._version = None

    def _check_is_over(self, found: Collector) -> None:
        # The modification time of the record is that of its last put.
        put_ns = self._store.objects.head(keys.COLLECTOR).modified_ns
        left_ns = put_ns + found.duration_s * SECOND_NS + MARGIN_NS - server_now(self._store)
        if left_ns > 0:
            raise ConflictError(
                f"{self._store.url}: another gc is running ({found.holder.hex()}, number {found.fence}); if it was killed, "
                f"its turn ends in {left_ns // SECOND_NS + 1} s",
                path=self._store.url,
            )

    def _check_is_fresh(self) -> None:
        """Check that a HEAD and a listing right after a put show that put: gc relies on such answers."""
        store = self._store
        listed = {item.key: item for item in objects_below(store.objects, keys.GC)}
        told = {"HEAD": store.objects.head(keys.COLLECTOR), "a listing": listed.get(keys.COLLECTOR)}
        for how, info in told.items():
            if info is None or info.version != self._version:
                self._version = None
                raise StoreError(
                    f"{store.where(keys.COLLECTOR)}: {how} returned metadata from before an acknowledged put: the object "
                    "tier, or a cache in front of it, is stale (clocks are not the cause). Nothing was collected",
                    path=keys.COLLECTOR,
                    tier="object",
                )

    def _put(self) -> None:
        store = self._store
        self.record = replace(self.record, sequence=self.record.sequence + 1)
        mode: PutMode = CREATE if self._version is None else Update(self._version)
        started = store.clock.monotonic()
        try:
            info = put_idempotent(store.objects, keys.COLLECTOR, self.record.encode(), mode=mode)
        except (AlreadyExistsError, ConflictError) as error:
            self._version = None
            raise ConflictError(
                f"{store.url}: another gc has taken over; this one has stopped", path=store.url
            ) from error
        self._version = info.version
        # Never earlier than a time reported before: responses may come from machines with different clocks.
        self.now_ns = max(self.now_ns, info.modified_ns or store.objects.head(keys.COLLECTOR).modified_ns)
        duration = self.record.duration_s
        self._valid_until, self._renew_at = started + duration, started + duration / 3


def read_collector(store: Store) -> tuple[Collector, Version | None]:
    """Return the collector's record and its version.

    An empty record stands for a missing one. A damaged one is returned as that of an unknown gc, whose turn may still
    run.

    Raises:
        FormatError: A newer tierfs wrote the record.
        StoreError, ReadOnlyError: The object tier failed.
    """
    where = store.where(keys.COLLECTOR)
    try:
        found, info, _ = read_decoded(store.objects, keys.COLLECTOR, COLLECTOR_BYTES_MAX, Collector.decode, where)
    except NotFoundError:
        return Collector(), None
    except CorruptionError as error:
        _logger.warning("the collector's record is damaged and is created again: %s", error)
        version = store.objects.head(keys.COLLECTOR).version
        return Collector(bytes([1]) * 16, duration_s=store.descriptor.lease_s), version
    return found, info.version


def server_now(store: Store) -> int:
    """Return the object tier's time in nanoseconds: the modification time of an object that is put for this purpose.

    Raises:
        StoreError, ReadOnlyError: The object cannot be put.
    """
    key = f"{keys.PROBE}now-{store.random_bytes(8).hex()}"
    now_ns = put_checked(store.objects, key, [b"now"]).modified_ns or store.objects.head(key).modified_ns
    store.objects.delete([key])
    return now_ns


def epoch_of(key: str) -> int:
    return int(key.removeprefix(keys.GC), 16)
