"""Garbage collection and scrubbing of a large store.

    python integration/bench/upkeep.py [--chunks 1000000] [--latency 20] [--concurrency 64] [--without-lists] [--json]

gc: a store of checkpoints of ten files with a hundred chunks each. One chunk in five is garbage. The object tier is
simulated: chunk objects are rows of a table without bytes. Each request takes --latency milliseconds, and a
listing takes that for each thousand objects. The collector, the listings, the reference lists and the condemned lists
are real. One run condemns, the next one deletes, at --rate. Memory is the growth of the process, without the table
and the records of the simulated tier.

scrub: files of 64 MiB of incompressible content, in a directory store in the page cache. verify and scrub take turns,
and the best of three runs counts.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import parser, peaks, say

from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest
from tierfs.format.upkeep import ReferenceList, record_check
from tierfs.objects import LocalObjects, MemoryObjects
from tierfs.objects.protocol import ObjectInfo, Version
from tierfs.store import Store, save, verify
from tierfs.store.encode.pipeline import Codecs
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.scrub import scrub
from tierfs.units import parse_size

SEED = 44
MIB = 1 << 20
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
            encoded = [name.encode() for name in names]
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


@dataclass
class Run:
    """The figures of one gc."""

    seconds: float
    peak_mib: float
    requests: int
    condemned: int
    deleted: int
    by_list: int


def simulated(chunks: int, latency_s: float, concurrency: int, rate: float, *, with_lists: bool) -> dict[str, Any]:
    """Run a gc that condemns a fifth of a store, and a gc that deletes it."""
    tier = SimulatedObjects(f"/bench-{os.getpid()}-{chunks}", chunks, latency_s, SEED)
    descriptor = Descriptor("0" * 32, 0, KIND, tier.capabilities, lease_s=60, grace_s=3600)
    tier.put(keys.DESCRIPTOR, [descriptor.encode()])
    checkpoints, files = fill(tier, chunks * 4 // 5, with_lists=with_lists)
    store = Store(tier, descriptor, url="simulated")
    tier.latency_s = tier.wanted_latency_s
    runs = []
    for _ in range(2):
        tier.later_ns += 2 * 3600 * 10**9
        before = tier.requests
        began, resident = time.perf_counter(), _resident()
        with peaks(resident=_resident) as highest:
            report = collect(store, GcOptions(concurrency=concurrency, deletes_per_s=rate))
        assert not report.is_blocked
        runs.append(
            Run(
                time.perf_counter() - began,
                (highest["resident"] - resident) / MIB,
                tier.requests - before,
                report.condemned.count,
                report.deleted.count,
                report.by_list,
            )
        )
    assert runs[0].condemned == runs[1].deleted == chunks - chunks * 4 // 5, runs
    assert int(tier.alive.sum()) == chunks * 4 // 5
    return {"chunks": chunks, "checkpoints": checkpoints, "files": files, "runs": [vars(run) for run in runs]}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- scrub -------------------------------------------------------------------------------------------------------------


def scrub_beside_verify(size: int, root: Path, rounds: int = 3) -> dict[str, float]:
    """Return the bytes a second of verify and scrub on a warm directory store: the best of alternating rounds."""
    objects = LocalObjects(root / "scrubbed")
    descriptor = Descriptor("0" * 32, 0, KIND, objects.capabilities, lease_s=60, grace_s=3600)
    objects.put(keys.DESCRIPTOR, [descriptor.encode()])
    store = Store(objects, descriptor, url=str(root), codecs=Codecs.parse("off"))
    for number in range(max(1, size // (64 * MIB))):
        save(store, str(number), os.urandom(64 * MIB))
    found = {"verify": 0.0, "scrub": 0.0}
    for _ in range(rounds):
        for name, run in (("verify", lambda: verify(store).raw_bytes), ("scrub", lambda: scrub(store).bytes)):
            began = time.perf_counter()
            found[name] = max(found[name], run() / (time.perf_counter() - began))
    return found


def main() -> None:
    arguments = parser(__doc__, "directory of the store to scrub")
    arguments.add_argument("--chunks", type=int, default=50_000)
    arguments.add_argument("--latency", type=float, default=20.0, help="milliseconds of a request")
    arguments.add_argument("--concurrency", type=int, default=64)
    arguments.add_argument("--rate", type=float, default=3000.0, help="deletions a second, as for `tierfs gc --rate`")
    arguments.add_argument("--without-lists", action="store_true", help="make gc read every record")
    arguments.add_argument(
        "--scrub", type=parse_size, default=256 * MIB, metavar="BYTES", help="bytes to verify and to scrub; 0 for none"
    )
    given = arguments.parse_args()
    found: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count(), "seed": SEED}
    if given.chunks:
        with_lists = not given.without_lists
        found["gc"] = simulated(
            given.chunks, given.latency / 1000, given.concurrency, given.rate, with_lists=with_lists
        )
    if given.scrub:
        with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=given.directory) as root:
            found["scrub"] = scrub_beside_verify(given.scrub, Path(root))
    say(found, as_json=given.json)


if __name__ == "__main__":
    main()
