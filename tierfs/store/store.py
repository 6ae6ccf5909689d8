"""An open store: its object tier, its descriptor, and this process's knowledge of it."""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierfs.clock import Clock, SystemClock
from tierfs.errors import StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import SaveMark
from tierfs.format.descriptor import Descriptor
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Record
from tierfs.host.host import state_directory
from tierfs.host.pending.levels import Level
from tierfs.host.slab.memory import memory_limit
from tierfs.objects.protocol import ObjectInfo, ObjectTier, Version
from tierfs.store.encode.pipeline import AUTO, Codecs
from tierfs.store.leases import LeaseCache
from tierfs.store.tree.host_records import HostRecords

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers
    from tierfs.store.encode.encoder import Encoder

# Budget of the record cache: 1/RECORDS_SHARE of the memory that the process may use, within these bounds. A record
# takes 800 bytes or more.
RECORDS_SHARE = 32
RECORDS_BYTES_MIN = 128 << 20
RECORDS_BYTES_MAX = 4 << 30
SAVES_BEGUN_MAX = 1000
# Estimated memory of a record, from measurements: OVERHEAD_BYTES for the fixed fields, which take FIXED_BYTES when
# encoded, plus the inline bytes, plus OBJECT_FACTOR times the encoded length of rows and metadata.
OVERHEAD_BYTES = 800
FIXED_BYTES = 120
OBJECT_FACTOR = 6


class Store:
    """A prefix of an object tier with a descriptor. Safe for use by many threads, in the process that opened it.

    In a forked child every use of its tiers raises `StoreError`. The fsspec filesystem, `TierReader` and `TierWriter`
    open it anew there.

    Args:
        objects: The object tier, based at the store's root.
        url: The root's name in messages.
        clock: Source of time. By default the system's clock.
        random_bytes: Source of random ids.
        tiers: The local tiers. None if all are off, or if the caller does not use them.
        hidden: The error that keeps the local tiers from being used, if changes may be pending in them.
        ack: The level at which a change is acknowledged by default.
        timeout_s: Seconds to wait for that level, and for room in the local tiers. None waits without limit.
        state_dir: Directory of this host's state. By default `state_directory`.
        codecs: Codecs that chunks may be encoded with.
        device_bytes: Budget of the device tier of each process that saves checkpoints from a GPU. 0 switches it off.
        unused: Why there are no local tiers, if they were asked for.
        handed_over: The options of the object tier's filesystem, and the codecs that the user asked for, if any: see
            `Store.hand_over`.

    Attributes:
        before_change: Called right before a record is put or sealed. If it raises, nothing is changed.
        checked_at: Time on ``clock`` at which the root was last seen to hold this store.
        descriptor_version: The version that the descriptor had then; ``None`` if it was not read.
    """

    def __init__(
        self,
        objects: ObjectTier,
        descriptor: Descriptor,
        *,
        url: str,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
        tiers: Tiers | None = None,
        hidden: TierfsError | None = None,
        ack: Level = Level.OBJECT,
        timeout_s: float | None = None,
        state_dir: Path | None = None,
        codecs: Codecs = AUTO,
        device_bytes: int = 0,
        unused: str = "",
        handed_over: tuple[dict[str, Any], str | None] | None = None,
    ) -> None:
        self._objects = objects
        self._process = os.getpid()
        self.descriptor = descriptor
        self.url = url
        self.clock: Clock = clock or SystemClock()
        self.random_bytes = random_bytes
        self._tiers = tiers
        self.hidden = hidden
        self.unused = unused
        self._handed_over = handed_over
        self.ack = ack
        self.timeout_s = timeout_s
        self.device_bytes = device_bytes
        self._codecs = codecs
        self._lock = threading.Lock()
        self._encoder: Encoder | None = None
        self._damage_told_to = tiers
        self.checked_at = self.clock.monotonic()
        self.descriptor_version: Version | None = None
        self.state_dir = state_dir
        self.records = RecordCache()
        # The saves of checkpoints that this process began, by the path of their metadata. See `Commits.begin`.
        self.saves_begun: deque[tuple[str, SaveMark]] = deque(maxlen=SAVES_BEGUN_MAX)
        # If the object tier is a directory of this host, a record is read there as fast as from this cache.
        local = descriptor.endpoint.host_local
        self.host_records = None if local else HostRecords(descriptor.uuid, state_dir or state_directory())
        self.lease_cache = LeaseCache(objects, descriptor, self.clock, random_bytes, host=socket.gethostname())
        self.before_change: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"Store({self.url!r}, uuid={self.descriptor.uuid!r}, objects={self._objects!r})"

    def new_write_id(self) -> bytes:
        """Return 16 bytes that no other change has. The last eight are those of all changes of this host."""
        host = bytes.fromhex(self._tiers.ram.host.name()) if self._tiers is not None else b""
        return self.random_bytes(16 - len(host)) + host

    @property
    def objects(self) -> ObjectTier:
        """The object tier, based at the store's root. Raises `StoreError` in a forked child."""
        self._check_process()
        return self._objects

    @property
    def tiers(self) -> Tiers | None:
        """The local tiers, or None if there are none. Raises `StoreError` in a forked child."""
        self._check_process()
        return self._tiers

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.url} was opened before this process was forked: open it, and files in it, again in this "
                "process",
                path=self.url,
            )

    @property
    def encoder(self) -> Encoder:
        """The encoder for chunks on their way to the object tier. All writers of this store share it."""
        with self._lock:
            if self._encoder is None:
                from tierfs.store.encode.encoder import Encoder  # noqa: PLC0415 - loads numpy

                self._encoder = Encoder(self._codecs, is_near=self.descriptor.endpoint.host_local, clock=self.clock)
            return self._encoder

    def hand_over(self, *, writes: bool) -> None:
        """Tell the flusher the options of this store, and whether this process writes with them."""
        if self._handed_over is not None and self._tiers is not None:
            options, codecs = self._handed_over
            self._tiers.flusher.hand_over(options, writes=writes, codecs=codecs)

    def without_local_tiers(self) -> Store:
        """Return this store without its local tiers, for a caller that needs the content of the object tier.

        It shares this process's knowledge with this store, and reports damage to the same flusher.
        """
        if self.tiers is None:
            return self
        bare = copy.copy(self)
        bare._tiers = bare.hidden = bare._handed_over = bare.timeout_s = None
        bare.ack, bare.unused, bare.device_bytes = Level.OBJECT, "", 0
        return bare

    def report_damage(self, name: ChunkName) -> None:
        """Note that a chunk object is damaged or missing. The next save of its bytes on this host stores them again."""
        self._check_process()
        self.lease_cache.mark_damaged(name)
        if self._damage_told_to is not None:
            self._damage_told_to.report_damage(keys.chunk_key(name))

    def where(self, key: str) -> str:
        """Return the name of one of the store's objects, for messages."""
        return f"{self.url}/{key}"


class RecordCache:
    """Records of the tree that this process has seen, by key and version. The least recently used are dropped first.

    A version never has two contents, so an entry is valid if its version is.

    Args:
        bytes_max: Budget in bytes, by estimate. By default a share of the memory that this process may use.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is None:
            bytes_max = min(max(memory_limit() // RECORDS_SHARE, RECORDS_BYTES_MIN), RECORDS_BYTES_MAX)
        self.bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[Version, Record, int]] = OrderedDict()

    def status(self) -> dict[str, int]:
        """Return the number of records, their estimated bytes, and the budget."""
        with self._lock:
            return {"count": len(self._entries), "bytes": self._bytes, "bytes_max": self.bytes_max}

    def get(self, key: str) -> tuple[Version, Record] | None:
        """Return the last version seen of this key, and its record."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0], entry[1]

    def find(self, infos: Iterable[ObjectInfo]) -> list[Record | None]:
        """Return the record of each object in exactly this version, in order. None if that version was not seen.

        All objects are looked up before any record is added. So a listing larger than the cache finds as many records
        as the cache holds. Adding records between the look-ups would evict each entry just before its look-up.
        """
        with self._lock:
            entries = self._entries
            return [
                entry[1] if (entry := entries.get(info.key)) is not None and entry[0] == info.version else None
                for info in infos
            ]

    def remember(self, key: str, version: Version, record: Record, encoded_bytes: int) -> None:
        """Keep the record of this version of the key. ``encoded_bytes`` is the length of the encoded record."""
        inline = len(record.inline or b"") if isinstance(record, Manifest) else 0
        size = OVERHEAD_BYTES + inline + OBJECT_FACTOR * max(0, encoded_bytes - inline - FIXED_BYTES)
        with self._lock:
            self._drop(key)
            self._entries[key] = (version, record, size)
            self._bytes += size
            while self._bytes > self.bytes_max:
                self._drop(next(iter(self._entries)))

    def forget(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry[2]
