"""What a host pays: shared memory, small files, first and large saves, flushers and their scans, at one to four sizes.

    python integration/bench/growth_host.py [--largest 10000] [--json]

- shared memory of a store that holds one small file, and of a state of N MB after one save;
- milliseconds for each of N files of 100 KiB, staged, local, and written to ext4 with fsync;
- seconds of a process's first save of N MB to S3 and of its second, by file and by checkpoint, if ministack is
  installed;
- seconds, bytes sent and private memory kept for a state of N times the ram tier;
- private memory, descriptors and processor time of the flusher of one of N stores;
- milliseconds that a flusher takes to find one new file while N drafts without bytes are pending.

N is ``--largest`` in the last row, and at most 400 in the others. ``--largest 10000`` takes a minute; less than 1000
only shows that everything works. Each row has its own state directories. Those of small files and flushers are on the
disk, because the levels need one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import back
from harness import Aims, cpu_seconds, parser, say, timed

import tierfs
from tierfs.clock import SystemClock
from tierfs.dcp import TierWriter
from tierfs.flusher.scan import PendingScan
from tierfs.flusher.state import FlushState
from tierfs.format.manifest import Tombstone
from tierfs.host.events import no_faults
from tierfs.host.host import Host
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import SlotKind

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MB = 1_000_000
SMALL_LARGEST = 1000
SMALL_BYTES = 100 << 10
GENERATION_S = 3.0  # for the process to allocate memory for a second save
STAGED_S = 1.5
_FIRST_SAVE = """
import json, os, sys, time
import fsspec
url, options, length = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
fs, root = fsspec.url_to_fs(f"tierfs::{url}", s3=options, tierfs={"ack": "staged"})
took = []
for number in range(2):
    with fs.open(f"{root}/{os.getpid()}-{number}", "wb") as file:
        file.write(os.urandom(length))
        time.sleep(float(sys.argv[4]))
        begun = time.perf_counter()
    fs.wait(root, "object", 60)
    took.append(time.perf_counter() - begun)
print(json.dumps(took))
"""
_FIRST_CHECKPOINTS = """
import json, sys, time
import torch, torch.distributed.checkpoint as dcp
from tierfs.dcp import TierWriter
url, options, length, pause = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
state = {f"layer{number}": torch.empty(length // 32, dtype=torch.int32).random_() for number in range(8)}
writer = TierWriter(f"tierfs::{url}", s3=options)
writer.prepare(state)
time.sleep(pause)
found = []
for number in range(2):
    begun = time.perf_counter()
    future = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"tierfs::{url}/step_{number}")
    blocked = time.perf_counter() - begun
    future.result()
    staged = time.perf_counter() - begun
    writer.wait("object", 100)
    found.append([blocked, staged, time.perf_counter() - begun])
    for tensor in state.values():
        tensor.bitwise_xor_(0x5DEECE66)
    time.sleep(2)
print(json.dumps(found))
"""


@contextlib.contextmanager
def _place(**environment: str) -> Iterator[tuple[Path, Path]]:
    """Yield a directory on the disk and a folder for segments. Stores opened in the block use them."""
    before = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-bench-") as disk,
        tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm") as shm,
    ):
        os.environ |= {"TIERFS_STATE_DIR": f"{disk}/state", "TIERFS_SHM_DIR": shm, **environment}
        try:
            yield Path(disk), Path(shm)
        finally:
            os.environ.clear()
            os.environ.update(before)


def _taken(folder: Path) -> int:
    """Return the bytes of memory that files below a folder occupy, not their lengths."""
    files = (Path(where) / name for where, _, names in os.walk(folder) for name in names)
    return sum(os.stat(file).st_blocks * 512 for file in files)


def shared_memory(sizes_mb: list[int]) -> dict[str, dict[int, float]]:
    """Return the shared memory of a store with a file of 100 KB, and of a state after a save.

    The first is in MiB. The second is a share of the state, after 64 MiB are subtracted.
    """
    little, states = {}, {}
    for size in sizes_mb:
        with _place(TIERFS_RAM="4GiB", TIERFS_NVME="0") as (disk, shm):
            url = f"file://{disk}/store"
            tierfs.init(url)
            fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack="staged")
            fs.pipe_file(f"{root}/small", os.urandom(SMALL_BYTES))
            little[size] = _taken(shm) / (1 << 20)
            state = {f"layer{number}": torch.randn(size * MB // 80) for number in range(20)}
            dcp.save(state, storage_writer=TierWriter(f"tierfs::{url}/step", ack="staged"), no_dist=True)
            time.sleep(GENERATION_S)
            states[size] = max(_taken(shm) - (64 << 20), 0) / (size * MB)
    return {"store with 100 KB, MiB of shared memory": little, "state, of it in shared memory, - 64 MiB": states}


def small_files(counts: list[int]) -> dict[str, dict[int, float]]:
    """Return the milliseconds for each of N files of 100 KiB, one after the other, in tierfs and on ext4 with fsync."""
    rows: dict[str, dict[int, float]] = {}
    for count in counts:
        data = [os.urandom(SMALL_BYTES) for _ in range(count)]
        for level in ("staged", "local"):
            with _place(TIERFS_RAM="2GiB", TIERFS_NVME="4GiB") as (disk, _):
                url = f"file://{disk}/store"
                tierfs.init(url)
                fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack=level)
                fs.pipe_file(f"{root}/first", data[0])
                took = [timed(fs.pipe_file, f"{root}/d/{n}", each) for n, each in enumerate(data)]
                rows.setdefault(f"{level}, ms a file", {})[count] = statistics.median(took) * 1e3
                if level == "staged":
                    whole = sum(took) + timed(fs.wait, f"{root}/d", "local", 60)
                    rows.setdefault("staged, then one wait for local, ms a file", {})[count] = whole / count * 1e3
                    took = [timed(_write_and_flush, disk / str(n), each) for n, each in enumerate(data)]
                    rows.setdefault("ext4 and fsync, ms a file", {})[count] = statistics.median(took) * 1e3
                fs.wait(root, "object", 120)
    return rows


def _write_and_flush(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def first_save(sizes_mb: list[int]) -> dict[str, dict[int, float]]:
    """Return the seconds from closing a file until S3 (ministack) has it, for a process's first and second file.

    The process writes a file, waits 1.5 s, and closes it.
    """
    import s3server

    first, second = {}, {}
    with s3server.running() as port:
        options = s3server.options(port)
        url = f"s3://{s3server.new_bucket(port)}/run"
        with _place(TIERFS_RAM="1GiB", TIERFS_NVME="2GiB"):
            tierfs.init(url, options=options)
            for size in sizes_mb:
                with tempfile.TemporaryDirectory(prefix="tierfs-bench-") as state:  # a new flusher
                    argv = [sys.executable, "-c", _FIRST_SAVE, url, json.dumps(options), str(size * MB), str(STAGED_S)]
                    environment = os.environ | {"TIERFS_STATE_DIR": state}
                    done = subprocess.run(argv, env=environment, check=True, capture_output=True)
                    first[size], second[size] = json.loads(done.stdout)
    return {"first save until in S3, s": first, "second save until in S3, s": second}


def first_checkpoint(sizes_mb: list[int], pause_s: float = STAGED_S) -> dict[str, dict[int, float]]:
    """Return the seconds of a writer's first and second save of N MB to S3 (ministack): blocked, staged, object.

    The first save begins ``pause_s`` seconds after the writer was made.
    """
    import s3server

    rows: dict[str, dict[int, float]] = {}
    with s3server.running() as port:
        options = s3server.options(port)
        for size in sizes_mb:
            url = f"s3://{s3server.new_bucket(port)}/run"
            with _place(TIERFS_RAM="3GiB", TIERFS_NVME="2GiB"):
                tierfs.init(url, options=options)
                back(3 * size * MB)
                argv = [
                    sys.executable,
                    "-c",
                    _FIRST_CHECKPOINTS,
                    url,
                    json.dumps(options),
                    str(size * MB),
                    str(pause_s),
                ]
                done = subprocess.run(argv, check=True, capture_output=True)
            for name, took in zip(("first", "second"), json.loads(done.stdout), strict=True):
                for level, seconds in zip(("blocked", "staged", "object"), took, strict=True):
                    rows.setdefault(f"{name} checkpoint, {level}, s", {})[size] = seconds
    return rows


def overflow(times: list[int]) -> dict[str, dict[int, float]]:
    """Save a state so many times as large as a ram tier of 32 MiB. Return seconds, bytes sent, and private memory."""
    sent, beside, staged_s, object_s = {}, {}, {}, {}
    for factor in times:
        with _place(TIERFS_RAM="32MiB", TIERFS_NVME="0") as (disk, _):
            url = f"file://{disk}/store"
            tierfs.init(url)
            state = {f"layer{number}": torch.randn(factor * (32 << 20) // 32) for number in range(8)}
            size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
            before, begun = _private_bytes(kind="Anonymous"), time.perf_counter()
            writer = TierWriter(f"tierfs::{url}/step", ack="staged")
            dcp.save(state, storage_writer=writer, no_dist=True)
            staged_s[factor] = time.perf_counter() - begun
            beside[factor] = (_private_bytes(kind="Anonymous") - before) / (1 << 20)
            writer.wait("object", timeout=120)
            object_s[factor] = time.perf_counter() - begun
            fs, root = fsspec.url_to_fs(f"tierfs::{url}")
            sent[factor] = fs.status(root)["counters"]["flusher_uploaded_bytes"] / size
    return {
        "overflow: bytes sent, of the state": sent,
        "overflow: private memory kept beside it, MiB": beside,
        "overflow: staged, s": staged_s,
        "overflow: object, s": object_s,
    }


def _private_bytes(pid: int | str = "self", *, kind: str = "Private_Dirty") -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def flushers(counts: list[int]) -> dict[str, dict[int, float]]:
    """Return private memory, descriptors and processor seconds of one of N flushers after its first small file."""
    rows: dict[str, dict[int, float]] = {}
    for count in counts:
        with _place(TIERFS_RAM="1GiB", TIERFS_NVME="256MiB") as (disk, _):
            pids = []
            for number in range(count):
                url = f"file://{disk}/store-{number}"
                tierfs.init(url)
                fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack="local")
                fs.pipe_file(f"{root}/a", os.urandom(SMALL_BYTES))
                fs.wait(root, "object", 60)
                pids.append(fs.status(root)["flusher"]["pid"])
            found = {
                "flusher of a store, MB private": sum(map(_private_bytes, pids)) / MB,
                "flusher of a store, descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
                "flusher of a store, CPU s": sum(map(cpu_seconds, pids)),
            }
            for name, value in found.items():
                rows.setdefault(name, {})[count] = value / count
    return rows


def looks(sizes: list[int]) -> dict[str, dict[int, float]]:
    """Return the milliseconds to find one new file while so many are pending, in a flusher without an nvme tier."""
    found: dict[int, float] = {}
    with _place() as (disk, shm):
        host, clock = Host(disk / "state", shm), SystemClock()
        writer, reader = (RamTier(host, "0" * 32, budget_bytes=1 << 30, clock=clock) for _ in range(2))
        state = FlushState(reader, None, clock=clock, random=lambda: 0.5, fault=no_faults)
        scan = PendingScan(state)

        def seal(number: int) -> None:
            write_id = number.to_bytes(16, "little")
            data = Draft(f"run/f{number}", Tombstone(write_id, 0, 0), ObservedBase(None)).encode()
            slot = writer.take(SlotKind.DRAFT, len(data), timeout_s=10)
            slot.segment.view(slot)[: len(data)] = data
            slot.segment.seal(slot, write_id, b"", stamp_ns=time.monotonic_ns())

        numbers = itertools.count()
        for size in sizes:
            for number in itertools.islice(numbers, size - max(found, default=0)):
                seal(number)
            scan.discover()
            took: list[float] = []
            for number in itertools.islice(numbers, 9):
                seal(number)
                begun = time.perf_counter()
                scan.discover()
                took.append(time.perf_counter() - begun)
            assert len(state.entries) == number + 1, "each look finds what is new"
            found[size] = statistics.median(took) * 1e3
        writer.close()
        reader.close()
    return {"a look for one new file, ms": found}


def sizes(largest: int) -> list[int]:
    """Return four sizes, each about five times the one before. The last is `largest`."""
    return [max(largest // divisor, 10) for divisor in (125, 25, 5, 1)]


def measured(largest: int) -> dict[str, dict[int, float]]:
    most = min(largest // 25, 400)
    some = [max(most // divisor, 1) for divisor in (27, 9, 3, 1)]
    count = 4 if largest >= SMALL_LARGEST else 1
    rows = shared_memory(some[-count:]) | small_files(some[-count:])
    rows |= overflow([2, 4, 8, 16][:count]) | flushers([1, 2, 4, 8][:count]) | looks(sizes(largest))
    try:
        return rows | first_save([1, 4, 16, 64][:count]) | first_checkpoint([8, 32, 128, 512][:count])
    except ModuleNotFoundError as error:
        print(f"no first saves to S3: {error}", file=sys.stderr)
        return rows


def judge(rows: dict[str, dict[int, float]], largest: int) -> list[dict[str, Any]]:
    """Compare the largest size of each row with its aim."""
    aims, last = Aims(), {name: list(points.values())[-1] for name, points in rows.items()}
    aims.at_most("store with one small file, MiB of shared memory", last["store with 100 KB, MiB of shared memory"], 4)
    aims.at_most("shared memory less 64 MiB, of the state", last["state, of it in shared memory, - 64 MiB"], 2)
    aims.at_most("staged, ms a file", last["staged, ms a file"], 0.5)
    aims.at_most("local, ms a file", last["local, ms a file"], 2)
    aims.at_most("staged, then one wait for local, ms a file", last["staged, then one wait for local, ms a file"], 0.4)
    aims.at_most("overflow: bytes sent, of the state", last["overflow: bytes sent, of the state"], 1.01)
    aims.at_most(
        "overflow: private memory, of the ram tier", last["overflow: private memory kept beside it, MiB"] / 32, 1
    )
    aims.at_most(f"a look for one new file, ms, {largest} pending", last["a look for one new file, ms"], 1)
    if "first save until in S3, s" in last:
        more = last["first save until in S3, s"] - last["second save until in S3, s"]
        aims.at_most("first save to S3, s more than the second", more, 1)
        more = last["first checkpoint, object, s"] - last["second checkpoint, object, s"]
        aims.at_most("first checkpoint to S3, s more than the second", more, 1)
    return aims.found


def main() -> None:
    arguments = parser(__doc__, "directory of the stores")
    arguments.add_argument("--largest", type=int, default=10_000)
    given = arguments.parse_args()
    tempfile.tempdir = given.directory
    logging.disable(logging.WARNING)
    rows = measured(given.largest)
    report = {"date": time.strftime("%Y-%m-%d"), "rows": rows, "aims": judge(rows, given.largest)}
    say(report, as_json=given.json)


if __name__ == "__main__":
    main()
