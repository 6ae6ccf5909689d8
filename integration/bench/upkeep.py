"""Garbage collection and scrubbing of a large store, and gc beside restic on the same directory.

    python integration/bench/upkeep.py [--chunks 1000000] [--latency 20] [--concurrency 64] [--without-lists]
        [--blobs 100000] [--json]

gc: a store of checkpoints of ten files with a hundred chunks each. One chunk in five is garbage. The object tier is
simulated: chunk objects are rows of a table without bytes. Each request takes --latency milliseconds, and a
listing takes that for each thousand objects. The collector, the listings, the reference lists and the condemned lists
are real. One run condemns, the next one deletes, at --rate. Memory is the growth of the process, without the table
and the records of the simulated tier.

scrub: files of 64 MiB of incompressible content, in a directory store in the page cache. verify and scrub take turns,
and the best of three runs counts.

restic: a directory of --blobs files of 4 KiB of incompressible content is backed up into a local repository. Every
second file is deleted, the directory is backed up again, the first snapshot is forgotten, and `restic prune` is
timed. tierfs has the same files in a directory store, each a chunk object of its own, written without tierfs's write
path. Every second file is deleted, and `gc --exclusive` is timed. Needs restic 0.14 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from upkeep_tier import KIND, SimulatedObjects, fill

from tierfs import digest
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.envelope import Block, Envelope
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, Tombstone, content_digest
from tierfs.objects import LocalObjects
from tierfs.store import Store, save, verify
from tierfs.store.encode.codecs import Codecs
from tierfs.store.maintenance.gc import GcOptions, GcReport, collect
from tierfs.store.maintenance.scrub import scrub
from tierfs.units import parse_size

SEED = 44
BLOB_BYTES = 4096
MIB = 1 << 20


class Watched:
    """Measure the seconds and the peak memory of a block."""

    def __enter__(self) -> Watched:
        self._ended = threading.Event()
        self._before = self._peak = _resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()
        self._thread.join()
        self.peak_mib = (self._peak - self._before) / MIB

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        with Watched() as watched:
            report = collect(store, GcOptions(concurrency=concurrency, deletes_per_s=rate))
        runs.append(_run(watched, report, tier.requests - before))
    assert runs[0].condemned == runs[1].deleted == chunks - chunks * 4 // 5, runs
    assert int(tier.alive.sum()) == chunks * 4 // 5
    return {"chunks": chunks, "checkpoints": checkpoints, "files": files, "runs": [vars(run) for run in runs]}


def _run(watched: Watched, report: GcReport, requests: int) -> Run:
    assert not report.is_blocked
    deleted, condemned = report.deleted.count, report.condemned.count
    return Run(watched.seconds, watched.peak_mib, requests, condemned, deleted, report.by_list)


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


# -- beside restic -----------------------------------------------------------------------------------------------------


def beside_restic(blobs: int, root: Path) -> dict[str, Any]:
    source = root / "source"
    names = _make_source(source, blobs)
    found: dict[str, Any] = {"blobs": blobs, "tierfs": _tierfs(source, names, root / "store")}
    if shutil.which("restic") is None:
        found["restic"] = "not installed"
        return found
    found["version"] = subprocess.run(["restic", "version"], capture_output=True, text=True, check=True).stdout.strip()
    repository = root / "repository"
    _restic(repository, "init")
    _restic(repository, "backup", source)
    for name in names[::2]:
        (source / name).unlink()
    _restic(repository, "backup", source)
    _restic(repository, "forget", "--keep-last", "1")
    found["restic"] = {"prune": _restic(repository, "prune")}
    return found


def _make_source(source: Path, blobs: int) -> list[str]:
    names = [f"d{number % 100}/{number}" for number in range(blobs)]
    for number in range(min(100, blobs)):
        (source / f"d{number}").mkdir(parents=True)
    for name in names:
        (source / name).write_bytes(os.urandom(BLOB_BYTES))
    return names


def _restic(repository: Path, *words: str | Path) -> dict[str, float]:
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "RESTIC_REPOSITORY": str(repository), "RESTIC_PASSWORD": "bench"}
    subprocess.run(["restic", "--no-cache", "-q", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "cpu": cpu, "peak_mib_of_all": after.ru_maxrss / 1024}


def _tierfs(source: Path, names: list[str], root: Path) -> dict[str, float]:
    objects = LocalObjects(root)
    descriptor = Descriptor("0" * 32, 0, KIND, objects.capabilities, inline_bytes=0, lease_s=60, grace_s=3600)
    objects.put(keys.DESCRIPTOR, [descriptor.encode()])
    for number, name in enumerate(names):
        raw = (source / name).read_bytes()
        block = digest.hash_bytes(KIND, raw)
        envelope = Envelope(KIND, digest.combine(KIND, len(raw), [block]), len(raw), (Block(block, 0, len(raw)),))
        row = Row(ChunkName(envelope.digest), len(raw), envelope.stored_length)
        _write(root / keys.chunk_key(row.name), envelope.encode() + raw)
        content = content_digest(KIND, len(raw), [row.name.digest])
        record: Manifest | Tombstone = Manifest(Kind.FILE, os.urandom(16), len(raw), 0, 0, KIND, content, rows=(row,))
        if number % 2 == 0:
            record = Tombstone(os.urandom(16), 0, 0)
        _write(root / keys.record_key(name), record.encode(name))
    store = Store(objects, descriptor, url=str(root))
    with Watched() as watched:
        report = collect(store, GcOptions(exclusive=True, deletes_per_s=1e9))
    assert report.deleted.count == len(names[::2]), report
    return {"seconds": watched.seconds, "peak_mib": watched.peak_mib, "deleted": report.deleted.count}


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# -- output ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--latency", type=float, default=20.0, help="milliseconds of a request")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3000.0, help="deletions a second, as for `tierfs gc --rate`")
    parser.add_argument("--without-lists", action="store_true", help="make gc read every record")
    parser.add_argument(
        "--blobs", type=int, default=2000, help="files in the directory that restic backs up; 0 for none"
    )
    parser.add_argument(
        "--scrub", type=parse_size, default=256 * MIB, metavar="BYTES", help="bytes to verify and to scrub; 0 for none"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count(), "seed": SEED}
    if given.chunks:
        with_lists = not given.without_lists
        found["gc"] = simulated(
            given.chunks, given.latency / 1000, given.concurrency, given.rate, with_lists=with_lists
        )
    if given.scrub:
        with tempfile.TemporaryDirectory(prefix="tierfs-bench-") as root:
            found["scrub"] = scrub_beside_verify(given.scrub, Path(root))
    if given.blobs:
        with tempfile.TemporaryDirectory(prefix="tierfs-bench-") as root:
            found["beside"] = beside_restic(given.blobs, Path(root))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    if "gc" in found:
        gc = found["gc"]
        print(
            f"{gc['chunks']} chunk objects, {gc['checkpoints']} checkpoints, {gc['files']} records, {given.latency:g} ms"
        )
        for what, run in zip(("condemns", "deletes"), gc["runs"], strict=True):
            print(f"  {what:9} {run['seconds']:8.1f} s  {run['peak_mib']:7.0f} MiB  {run['requests']:8} requests")
    if "scrub" in found:
        speeds = found["scrub"]
        print(
            f"scrub {speeds['scrub'] / MIB:.0f} MiB/s, verify {speeds['verify'] / MIB:.0f} MiB/s: {speeds['scrub'] / speeds['verify']:.2f}"
        )
    if "beside" in found:
        beside = found["beside"]
        print(f"{beside['blobs']} files of {BLOB_BYTES} bytes, half of them deleted; {beside.get('version', '')}")
        print(
            f"  tierfs gc --exclusive     {beside['tierfs']['seconds']:8.2f} s  {beside['tierfs']['peak_mib']:7.0f} MiB"
        )
        if isinstance(beside["restic"], dict):
            for what, run in beside["restic"].items():
                print(
                    f"  restic {what:20} {run['seconds']:8.2f} s  {run['peak_mib_of_all']:7.0f} MiB (the most of any restic)"
                )


if __name__ == "__main__":
    main()
