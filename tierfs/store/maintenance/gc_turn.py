"""The turn to collect garbage: one gc at a time, by a conditional lease on the object tier's own clock.

FORMAT.md, "Collector". All times that gc compares are those that the object tier gave in its answers to the puts of one object, the
collector's record. The clock of the host that gc runs on measures how long this process may believe in its turn, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.collector import COLLECTOR_BYTES_MAX, NOBODY, Collector, EpochState
from tierfs.objects.checksums import put_checked, put_idempotent
from tierfs.objects.protocol import CREATE, ObjectInfo, PutMode, Update, Version, objects_below
from tierfs.store.store import Store

__all__ = ["MARGIN_NS", "SECOND_NS", "Turn", "read_collector", "server_now"]

SECOND_NS = 1_000_000_000
MARGIN_NS = 2 * SECOND_NS
"""Object tiers tell times to the second, and their machines' clocks differ by a little."""
PART_BITS = 16
_logger = logging.getLogger("tierfs.gc")


class Turn:
    """The right of one gc to publish condemned lists and to delete. For one thread.

    Args:
        store: The store.

    Attributes:
        now_ns: The object tier's time of the last put of the record: it is not earlier now.
        record: The record as this gc put it last.
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
            ConflictError: Another gc has it.
            StoreError: The object tier failed; or it answers with metadata that is older than what was just put.
        """
        store = self._store
        found, version = read_collector(store)
        epochs = [epoch_of(item.key) for item in _lists(store)]
        if found.holder != NOBODY:
            self._check_is_over(found)
        # What is made anew must not count from one again: epochs are never used twice.
        floor = found.fence if version is not None and found.sequence else store.clock.now_ns() // SECOND_NS
        fence = max([floor, *(epoch >> PART_BITS for epoch in epochs)]) + 1
        known = {epoch: state for epoch, state in found.epochs.items() if epoch in set(epochs)}
        self.record = Collector(store.random_bytes(16), fence, 0, store.descriptor.lease_s, known, found.last)
        self._version = version
        self._put()
        self._check_is_fresh()
        # A list that a gc put right before it ended counts from now on: whoever looks sees it.
        self.note(
            {**known, **{epoch: EpochState(self.now_ns) for epoch in epochs if epoch not in known}}, self.record.last
        )

    def hold(self) -> None:
        """Make sure, right before something is done that only one gc may do, that it is this one's turn still.

        Raises:
            ConflictError: Another gc has taken over.
            StoreError: It cannot be told.
        """
        if self._store.clock.monotonic() >= self._renew_at:
            self._put()

    def renew(self) -> int:
        """Put the record, and return the object tier's time of that."""
        self._put()
        return self.now_ns

    def note(self, epochs: Mapping[int, EpochState], last: Mapping[str, Any]) -> None:
        """Change what the record says; it is put with the next renewal."""
        self.record = replace(self.record, epochs=dict(epochs), last=dict(last))

    def epoch(self, part: int) -> int:
        """Number of a condemned list of this gc."""
        assert part < 1 << PART_BITS
        return self.record.fence << PART_BITS | part

    def end(self) -> None:
        """Give the turn back, with what was noted. Does nothing where another gc has it."""
        if self._version is None:
            return
        self.record = replace(self.record, holder=NOBODY)
        with contextlib.suppress(ConflictError):
            self._put()
        self._version = None

    def _check_is_over(self, found: Collector) -> None:
        # The record's time in the answer to a read is that of its last put.
        put_ns = self._store.objects.head(keys.COLLECTOR).modified_ns
        left_ns = put_ns + found.duration_s * SECOND_NS + MARGIN_NS - server_now(self._store)
        if left_ns > 0:
            raise ConflictError(
                f"{self._store.url}: another gc is at work ({found.holder.hex()}, number {found.fence}); if it was killed, its turn "
                f"ends in {left_ns // SECOND_NS + 1} s",
                path=self._store.url,
            )

    def _check_is_fresh(self) -> None:
        """Whether what is asked right after a put tells of that put: all that gc relies on is told in that way."""
        store = self._store
        listed = {item.key: item for item in objects_below(store.objects, keys.GC)}
        told = {"HEAD": store.objects.head(keys.COLLECTOR), "a listing": listed.get(keys.COLLECTOR)}
        for how, info in told.items():
            if info is None or info.version != self._version:
                self._version = None
                raise StoreError(
                    f"{store.where(keys.COLLECTOR)}: {how} answers with metadata from before a put that was acknowledged: the "
                    "object tier, or a cache before it, is stale (this is not about clocks). Nothing was collected",
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
        # Not earlier than what was told before, should the answers come from machines whose clocks differ.
        self.now_ns = max(self.now_ns, info.modified_ns or store.objects.head(keys.COLLECTOR).modified_ns)
        duration = self.record.duration_s
        self._valid_until, self._renew_at = started + duration, started + duration / 3


def read_collector(store: Store) -> tuple[Collector, Version | None]:
    """The collector's record and its version; an empty one where there is none, or a damaged one.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    version: Version | None = None
    try:
        data, info = store.objects.read(keys.COLLECTOR, COLLECTOR_BYTES_MAX)
        version = info.version
        return Collector.decode(data, store.where(keys.COLLECTOR)), version
    except NotFoundError:
        return Collector(), None
    except CorruptionError as error:
        _logger.warning("the collector's record is made anew: %s", error)
        version = version or store.objects.head(keys.COLLECTOR).version  # where it is too large to be read
        return Collector(bytes([1]) * 16, duration_s=store.descriptor.lease_s), version


def server_now(store: Store) -> int:
    """The object tier's time, in nanoseconds: that of an object which is put for it.

    Raises:
        StoreError, ReadOnlyError: It cannot be put.
    """
    key = f"{keys.PROBE}now-{store.random_bytes(8).hex()}"
    now_ns = put_checked(store.objects, key, [b"now"]).modified_ns or store.objects.head(key).modified_ns
    store.objects.delete([key])
    return now_ns


def epoch_of(key: str) -> int:
    """The epoch of the condemned list that lies there."""
    return int(key.removeprefix(keys.GC), 16)


def _lists(store: Store) -> list[ObjectInfo]:
    """The condemned lists that are there."""
    return [item for item in objects_below(store.objects, keys.GC) if keys.is_condemned_key(item.key)]
