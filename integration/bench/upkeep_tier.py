"""An object tier with millions of chunk objects without their bytes, which answers each request after a delay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest
from tierfs.format.references import ReferenceList, record_check
from tierfs.objects import MemoryObjects
from tierfs.objects.protocol import ObjectInfo, Version
from tierfs.store.maintenance.gc.name_set import encode_names

KIND = DigestKind.XXH3_128
PAGE = 1000
STORED_BYTES = 11 << 20
FILE_CHUNKS = 100
CHECKPOINT_FILES = 10


class SimulatedObjects(MemoryObjects):
    """Chunk objects are rows of a table that can be listed and deleted, without bytes. Other objects are in memory.

    Args:
        root: Root of the objects in memory.
        chunks: Number of chunk objects.
        latency_s: Delay of each request, and of each thousand objects of a listing.
        seed: Seed of the digests.
    """

    def __init__(self, root: str, chunks: int, latency_s: float, seed: int) -> None:
        super().__init__(root)
        self.latency_s = 0.0  # no delay while the store is made
        self.wanted_latency_s = latency_s
        self.later_ns = 0
        self.requests = 0
        drawn = np.random.default_rng(seed).integers(0, 256, (chunks, 16), np.uint8)
        self.digests = np.sort(drawn.view("S16").ravel())
        self.alive = np.ones(chunks, np.bool_)
        firsts = np.frombuffer(self.digests.tobytes(), np.uint8)[::16]
        self._starts = np.searchsorted(firsts, np.arange(257))
        self._old_ns = time.time_ns() - 10**15

    def digest(self, index: int) -> bytes:
        return bytes(self.digests[index]).ljust(16, b"\0")

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Any]:
        if not prefix.startswith(keys.CHUNKS):
            for number, item in enumerate(super().list(prefix, delimiter=delimiter)):
                if number % PAGE == 0:
                    self._wait()
                yield self._stamped(item) if isinstance(item, ObjectInfo) else item
            return
        first = int(prefix[len(keys.CHUNKS) : len(keys.CHUNKS) + 2], 16)
        self._wait()
        for number, index in enumerate(range(self._starts[first], self._starts[first + 1])):
            if number % PAGE == PAGE - 1:
                self._wait()
            if self.alive[index]:
                key = keys.chunk_key(ChunkName(self.digest(index)))
                yield ObjectInfo(key, STORED_BYTES, Version("1"), self._old_ns)

    def delete(self, keys_to_delete: Iterable[str]) -> None:
        """Count a request for each thousand keys, and wait once."""
        wanted = list(keys_to_delete)
        self._wait(max(1, len(wanted) // PAGE))
        chunks = [key for key in wanted if key.startswith(keys.CHUNKS)]
        digests = b"".join(keys.parse_chunk_key(key, KIND).digest for key in chunks)
        self.alive[np.searchsorted(self.digests, np.frombuffer(digests, "S16"))] = False
        super().delete([key for key in wanted if not key.startswith(keys.CHUNKS)])

    def put(self, key: str, data: Sequence[Any], **how: Any) -> ObjectInfo:
        self._wait()
        return self._stamped(super().put(key, data, **how))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        self._wait()
        data, info = super().read(key, limit)
        return data, self._stamped(info)

    def head(self, key: str) -> ObjectInfo:
        self._wait()
        return self._stamped(super().head(key))

    def _stamped(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, modified_ns=info.modified_ns + self.later_ns)

    def _wait(self, requests: int = 1) -> None:
        self.requests += requests
        if self.latency_s:
            time.sleep(self.latency_s)


def fill(tier: SimulatedObjects, needed: int, *, with_lists: bool) -> tuple[int, int]:
    """Make checkpoints that need `needed` chunks in random order. Return the number of checkpoints and of files.

    With lists, records are placeholders of a record's length, because gc does not read them.
    """
    order = np.random.default_rng(1).permutation(len(tier.digests))[:needed]
    checkpoints = files = 0
    for start in range(0, needed, FILE_CHUNKS * CHECKPOINT_FILES):
        directory = f"run/step_{checkpoints}"
        part = order[start : start + FILE_CHUNKS * CHECKPOINT_FILES]
        names = [ChunkName(tier.digest(int(index))) for index in part]
        checks = []
        for number in range(0, len(names), FILE_CHUNKS):
            path = f"{directory}/__{number}_0.distcp"
            rows = tuple(Row(name, 16 << 20, STORED_BYTES) for name in names[number : number + FILE_CHUNKS])
            checks.append(_put(tier, path, rows, is_hollow=with_lists))
            files += 1
        checks.append(_put(tier, f"{directory}/.metadata", (), is_hollow=False))
        if with_lists:
            encoded = [encode_names([name]) for name in names]
            listed = ReferenceList.of(directory, KIND, checks, encoded)
            tier.put(keys.references_key(directory), [listed.encode()])
        checkpoints += 1
    return checkpoints, files + checkpoints


def _put(tier: SimulatedObjects, path: str, rows: tuple[Row, ...], *, is_hollow: bool) -> bytes:
    length = sum(row.raw_length for row in rows)
    digest = content_digest(KIND, length, [row.name.digest for row in rows])
    record = Manifest(Kind.FILE, bytes(16), length, 0, 0, KIND, digest, rows=rows)
    data = bytes(120) if is_hollow else record.encode(path)
    key = keys.record_key(path)
    return record_check(key, tier.put(key, [data]).version)
