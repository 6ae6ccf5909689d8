"""The writer's lease, and the chunks that the writer knows to be in the store.

FORMAT.md, "Leases and condemned chunks". Garbage collection condemns unreached chunks, and deletes them one grace later
if they are still unreached. A writer that refers to a chunk that it did not just store must not rely on knowledge older
than that. So knowledge counts only within the continuous lease in which it was gained (its *term*). Each renewal reads
the lists of condemned chunks, and a condemned chunk counts as absent.

A chunk that a manifest names is safe from garbage collection, so another manifest may refer to it. Its object may still
have been lost. A writer that holds the bytes of such a chunk therefore checks first that the object exists.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

from tierfs.clock import Clock
from tierfs.errors import ConflictError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import Row
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.protocol import CREATE, ObjectInfo, ObjectTier, PutMode, Update, Version, objects_below
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store.looks import within

KNOWN_MAX = 200_000
LOOKS_AT_FIRST = 2
LOOKS_EARNED = 3
LOOKS_MAX = 64
LIST_BYTES_MAX = 64 << 20
RELEASE_S = 2.0
_logger = logging.getLogger("tierfs.store")

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class ChunkFacts:
    """A writer's knowledge of one chunk object.

    Attributes:
        named_in: The last term in which a manifest named the object, or it was seen as the base of another one.
        is_seen: Whether this writer put or saw it, in any term.
        is_own: Whether this writer put it, in any term.
        checked_s: When this writer last read it back, or a part of it, and found it intact; monotonic time of the
            store's clock.
        is_checked: Whether any such read covered the whole object.
    """

    named_in: int = -1
    is_seen: bool = False
    is_own: bool = False
    checked_s: float | None = None
    is_checked: bool = False


class LeaseCache:
    """One writer's lease and its knowledge of chunks in the store. Safe for use by many threads."""

    def __init__(
        self,
        objects: ObjectTier,
        descriptor: Descriptor,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        *,
        host: str,
    ) -> None:
        self._objects = objects
        self._descriptor = descriptor
        self._clock = clock
        self._random_bytes = random_bytes
        self._host = host
        self._lock = threading.Lock()
        self._holder = b""
        self._sequence = 0
        self._term = 0
        self._version: Version | None = None
        self._renew_at = self._valid_until = self._term_since = float("-inf")
        # The chunks that a manifest names or that were seen, both in this term, and whether they were seen; by digest.
        self._rows: dict[bytes, tuple[Row, bool]] = {}
        self._facts: dict[ChunkName, ChunkFacts] = {}
        self._damaged: dict[ChunkName, None] = {}
        self._lost: dict[ChunkName, None] = {}
        self._condemned: dict[str, tuple[Version, AbstractSet[ChunkName]]] = {}  # the lists, by their keys
        self._looks = LOOKS_AT_FIRST
        self._process = 0  # that took the lease, not a child
        self._is_in_doubt = False
        _opened.add(self)

    def ensure(self) -> int:
        """Renew the lease unless more than half of it is left. Forget what was learned in a lease that ran out.

        Returns:
            The term: the number of the continuous lease. Knowledge gained from now on belongs to it.

        Raises:
            StoreError: The lease could not be renewed in time.
        """
        with self._lock:
            if self._clock.monotonic() < self._renew_at:
                return self._term
            # The duration counts from before the request is sent, so this writer's view of the lease ends no later than
            # the server's.
            start = self._clock.monotonic()
            if start >= self._valid_until:
                self._begin_term(start)
            self._renew(start)
            self._read_condemned()
            duration = self._descriptor.lease_s
            if self._clock.monotonic() >= start + duration:
                raise StoreError(
                    f"renewing the lease took longer than it lasts ({duration} s): the object tier is too slow; "
                    "nothing was published",
                    transient=True,
                    tier="object",
                )
            self._valid_until = start + duration
            self._renew_at = start + duration / 2
            return self._term

    def keep(self) -> None:
        """Note that a put may take effect late: then the lease runs out by itself, whenever the process ends."""
        self._is_in_doubt = True

    def release(self) -> None:
        """Delete the lease at the end of the process, when nothing is written any more, so that nobody waits for it."""
        if not self._lock.acquire(blocking=False):
            return  # another thread waits for the object tier
        try:
            version, self._version = self._version, None
            is_live = self._clock.monotonic() < self._valid_until and self._process == os.getpid()
            self._valid_until = self._renew_at = float("-inf")
        finally:
            self._lock.release()
        if version is None or self._is_in_doubt or not is_live:
            return
        objects = self._objects
        while isinstance(objects, WrappedObjects):  # without retries: the process is to end
            objects = objects.inner
        key = keys.lease_key(self._holder)
        try:
            within(RELEASE_S, lambda: objects.delete_version(key, version))
        except TierfsError as error:
            _logger.debug("%s runs out by itself: %s", key, error)

    def is_valid(self, term: int) -> bool:
        """Return whether knowledge gained in a term still counts. Call it right before putting a manifest."""
        with self._lock:
            return term == self._term and self._clock.monotonic() < self._valid_until

    def is_too_late(self) -> bool:
        """Return whether a manifest put just now may have arrived after its chunks were collected."""
        with self._lock:
            begun = self._valid_until - self._descriptor.lease_s
            return self._clock.monotonic() >= begun + self._descriptor.grace_s

    def find(self, digest: bytes) -> Row | None:
        """Return the chunk with this digest, if it was seen in the store. Call `ensure` first."""
        with self._lock:
            row, is_seen = self._rows.get(digest, (None, False))
            return row if is_seen else None

    def find_listed(self, digest: bytes) -> Row | None:
        """Return the chunk with this digest that a manifest names. The chunk may have been lost since."""
        with self._lock:
            return self._rows.get(digest, (None, False))[0]

    def add_listed(self, term: int, rows: Iterable[Row], *, since: float | None = None) -> None:
        """Note that a manifest names these chunks, so that another manifest may refer to them.

        The manifest was read after `ensure` returned ``term``, or at ``since``. Chunks that this writer put or saw in
        any term count as known, without another look.

        Args:
            since: Monotonic time at which the manifest was read, if that was before `ensure` returned. If it was before
                the lease began, the chunks are ignored.
        """
        with self._lock:
            if term != self._term or (since is not None and since < self._term_since):
                return
            for row in rows:
                names = (row.name, *row.bases)
                if self._is_bad(row):
                    continue
                for name in names:
                    self._facts_of(name).named_in = term
                if not self._rows.get(row.name.digest, (row, False))[1]:
                    self._rows[row.name.digest] = row, all(self._facts_of(name).is_seen for name in names)
            _trim(self._rows)

    def add_verified(self, name: ChunkName, *, is_whole: bool = False) -> None:
        """Note that this chunk object, or all of it, was just read. If a manifest names it, it then counts as known.

        Does nothing while another thread holds the lock.
        """
        # `ensure` holds the lock during a renewal, and a reader must not wait for that.
        if name.digest not in self._rows or not self._lock.acquire(blocking=False):
            return
        try:
            if is_whole:
                self._note_check(name, self._clock.monotonic(), is_whole=True)
            row, _ = self._rows.get(name.digest, (None, False))
            if row is not None and row.name == name and not row.bases:
                self._rows[name.digest] = row, True
                self._facts_of(name).is_seen = True
        finally:
            self._lock.release()

    def learn(self, term: int, rows: Iterable[Row], *, named: bool = False) -> None:
        """Note that these chunks were seen in the store, or put there, after `ensure` returned ``term``.

        ``named`` says whether the chunks' bases were seen, too.
        """
        with self._lock:
            for row in rows:
                self._lost.pop(row.name, None)
                self._facts_of(row.name).is_seen = True
                if term == self._term and not self._is_bad(row):
                    self._rows[row.name.digest] = row, True
                    for base in row.bases if named else ():
                        self._facts_of(base).named_in = term
            _trim(self._rows)

    def note_put(self, name: ChunkName) -> None:
        with self._lock:
            facts = self._facts_of(name)
            # A check was of an earlier object of this name, which was removed.
            facts.is_own, facts.checked_s, facts.is_checked = True, None, False

    def note_check(self, name: ChunkName, at: float, *, is_whole: bool) -> None:
        """Note that this chunk object was read back at a monotonic time, and was intact."""
        with self._lock:
            self._note_check(name, at, is_whole=is_whole)

    def facts(self, name: ChunkName) -> ChunkFacts:
        """Return what this writer knows of a chunk object, not to be changed."""
        with self._lock:
            return self._facts.get(name, _NOTHING)

    def is_unusable(self, name: ChunkName) -> bool:
        """Return whether this chunk object must not be referred to: it is condemned or known to be damaged."""
        with self._lock:
            return self._is_condemned(name) or name in self._damaged

    def mark_damaged(self, name: ChunkName) -> None:
        """Note that this chunk object is damaged or missing, so that a later save of its bytes stores them again."""
        with self._lock:
            self._damaged[name] = None
            _trim(self._damaged)
            self._forget({name})
            self._facts.pop(name, None)
            # Forget other objects with the same bytes, too. The next save then tries this name first, which may be free
            # again because the damaged object was removed.
            self._rows.pop(name.digest, None)

    def is_damaged(self, name: ChunkName) -> bool:
        with self._lock:
            return name in self._damaged

    def clear_damaged(self, name: ChunkName) -> None:
        """Undo `mark_damaged`: the object is gone or healed. It counts as lost until it is stored or seen again."""
        with self._lock:
            self._damaged.pop(name, None)
            self._facts_of(name).is_seen = False
            self._lost[name] = None
            _trim(self._lost)

    def is_lost(self, name: ChunkName) -> bool:
        """Return whether this chunk object was removed and not stored again.

        Objects encoded against it are healed only if its bytes are stored under this very name, without a base.
        """
        with self._lock:
            return name in self._lost

    def spend_look(self) -> bool:
        """Return whether to look for a chunk before sending it, if it is not known to be stored. Uses up one look.

        A look costs a request, and saves sending a chunk that is stored. Changed chunks are rarely stored, and
        unchanged chunks come in sequences. So each find earns more looks, and looks stop while nothing is found.
        """
        with self._lock:
            if not self._looks:
                return False
            self._looks -= 1
            return True

    def earn_looks(self) -> None:
        """Note that a chunk was found in the store before or after it was sent."""
        with self._lock:
            self._looks = min(LOOKS_MAX, self._looks + LOOKS_EARNED)

    def unverified(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows that are not known to be in the store within this lease. Call `ensure` first."""
        with self._lock:
            return [row for row in rows if not all(map(self._is_there, (row.name, *row.bases)))]

    def _begin_term(self, now: float) -> None:
        self._term += 1
        self._term_since = now
        self._rows.clear()

    def _note_check(self, name: ChunkName, at: float, *, is_whole: bool) -> None:
        facts = self._facts_of(name)
        facts.checked_s, facts.is_checked = at, is_whole or facts.is_checked

    def _facts_of(self, name: ChunkName) -> ChunkFacts:
        """Return the facts of a chunk object, to be changed."""
        facts = self._facts.get(name)
        if facts is None:
            facts = self._facts[name] = ChunkFacts()
            _trim(self._facts)
        return facts

    def _is_bad(self, row: Row) -> bool:
        return any(self._is_condemned(name) or name in self._damaged for name in (row.name, *row.bases))

    def _is_condemned(self, name: ChunkName) -> bool:
        return any(name in names for _, names in self._condemned.values())

    def _is_there(self, name: ChunkName) -> bool:
        if self._facts.get(name, _NOTHING).named_in == self._term:
            return True
        row, is_seen = self._rows.get(name.digest, (None, False))
        return row is not None and is_seen and row.name == name

    def _renew(self, now: float) -> None:
        if self._version is not None:
            try:
                self._put_lease(Update(self._version))
            except ConflictError:
                # Another client deleted it as expired, or it was damaged: knowledge gained in it no longer counts.
                self._version = None
                self._begin_term(now)
            else:
                return
        self._holder, self._sequence, self._process = self._random_bytes(16), 0, os.getpid()
        self._sweep(self._put_lease(CREATE))

    def _sweep(self, mine: ObjectInfo) -> None:
        """Delete leases that ran out more than a grace ago by the object tier's clock. gc does so too.

        If that fails, for example because this client may not delete, the leases stay and do no harm.
        """
        oldest_ns = mine.modified_ns - (self._descriptor.lease_s + self._descriptor.grace_s) * 1_000_000_000
        try:
            leases = objects_below(self._objects, keys.LEASES)
            expired = [item.key for item in leases if 0 < item.modified_ns < oldest_ns]
            if expired:
                self._objects.delete(expired)
        except TierfsError as error:
            _logger.warning("expired leases remain, because they could not be deleted: %s", error)

    def _put_lease(self, mode: PutMode) -> ObjectInfo:
        self._sequence += 1
        key = keys.lease_key(self._holder)
        lease = Lease(self._holder, self._sequence, self._descriptor.lease_s, self._host, self._clock.now_ns())
        info = put_idempotent(self._objects, key, lease.encode(), mode=mode)  # no other client uses this id
        self._version = info.version
        return info

    def _read_condemned(self) -> None:
        """Read the condemned lists that are new, and drop the lists that gc has deleted."""
        current = {item.key: item for item in objects_below(self._objects, keys.GC)}
        lists: dict[str, tuple[Version, AbstractSet[ChunkName]]] = {}
        for key in sorted(filter(keys.is_condemned_key, current)):
            known = self._condemned.get(key)
            if known is not None and known[0] == current[key].version:
                lists[key] = known
                continue
            try:
                listed, info, _ = read_decoded(self._objects, key, LIST_BYTES_MAX, Condemned.decode, key)
            except NotFoundError:
                continue
            if listed.digest_kind is not self._descriptor.digest_kind or keys.condemned_key(listed.epoch) != key:
                raise FormatError(f"{key}: a condemned list of another epoch or with another kind of digest", path=key)
            lists[key] = (info.version, listed.names)
        new = [names for key, (_, names) in lists.items() if self._condemned.get(key) is not lists[key]]
        if not new and len(lists) == len(self._condemned):
            return
        self._condemned = lists
        referred = {name for row, _ in self._rows.values() for name in (row.name, *row.bases)} | self._facts.keys()
        self._forget({name for names in new for name in names if name in referred})

    def _forget(self, names: AbstractSet[ChunkName]) -> None:
        """Forget that chunks are in the store if they have one of these names, or need one. Other knowledge stays."""
        gone = [row for row, _ in self._rows.values() if row.name in names or not names.isdisjoint(row.bases)]
        for row in gone:
            del self._rows[row.name.digest]
        for name in names & self._facts.keys():
            self._facts[name].named_in, self._facts[name].is_seen = -1, False


_NOTHING = ChunkFacts()
_opened: weakref.WeakSet[LeaseCache] = weakref.WeakSet()


def release_leases() -> None:
    """Release the leases that this process took. Called when it ends."""
    for cache in list(_opened):
        cache.release()


# Registered before any store is opened, so that it runs after stores are closed.
atexit.register(release_leases)


def _trim(known: dict[_Key, _Value]) -> None:
    """Drop the oldest entries beyond KNOWN_MAX."""
    while len(known) > KNOWN_MAX:
        del known[next(iter(known))]
