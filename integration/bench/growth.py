"""How costs grow: each row at four sizes in one run, and the exponent of the best-fitting power of the size.

    python integration/bench/growth.py [--largest 10000] [--json]

An exponent of 0 is flat, 1 is linear. These rows run in one process and one store on tmpfs with the ram tier alone:

- a staged save, and ``exists``, while N files are pending (the flusher is stopped);
- LIST requests of the flusher for each of N new files in one directory;
- the time to stage a state of up to 4 N tensors of 4 KB, relative to copying them into reused memory;
- files in ``last/`` after N saves to it, with a grace of 2 s;
- LIST requests of ``ls`` for N directories in one directory of a simulated remote tier;
- for ten times as many names there: microseconds a name that ``find`` takes beyond the tier's own listing, and the
  records that a second ``find`` with details reads again;
- the metadata of a checkpoint of up to 1,024 simulated ranks and 300 tensors in twelve shapes: processor seconds
  of one rank to locate its own part, relative to unpickling the metadata. Nothing else is read;
- microseconds of a step of the flusher's queue while N drafts wait for their next attempt;
- microseconds that an eviction of 4 chunks holds the lock of the nvme tier's tables, with ten times as many chunks
  whose order is known. This row and the one before have tables alone, without bytes.

These rows are about a host and have their own directories (`growth_host.py`; N is at most 400 there):

- shared memory of a store that holds one small file, and of a state of N MB after one save;
- milliseconds for each of N files of 100 KiB, staged, local, and written to ext4 with fsync;
- seconds of a process's first save of N MB to S3 and of its second, if ministack is installed;
- bytes sent and private memory kept for a state of N times the ram tier;
- private memory, descriptors and processor time of the flusher of one of N stores;
- milliseconds that a flusher takes to find one new file while N drafts without bytes are pending.

``--largest 10000`` takes a minute; ``--largest 1000`` is the smallest size.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import logging
import math
import os
import pickle
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from aims import Aims, show
from fsspec.implementations.memory import MemoryFileSystem
from growth_host import first_save, flushers, looks, shared_memory, small_files, waves
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import tierfs
from tierfs.clock import ManualClock
from tierfs.dcp import TierWriter
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.load.coverage import mark_absent
from tierfs.dcp.metadata import decode, encode
from tierfs.digest import DigestKind
from tierfs.flusher.queue import FlushItem, FlushQueue
from tierfs.format import keys
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest
from tierfs.host.nvme.arena.extent_page import GRANULE
from tierfs.host.nvme.ledger import EvictionCandidate, Extent, Ledger, candidates
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.host.rpc.stopping import stop_flusher
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, find, list_directory
from tierfs.store.encode.parents import ListedNames, find_parent

TIMES = 15
SMALL_LARGEST = 1000
GRACE_S = 2


def sizes(largest: int) -> list[int]:
    """Return four sizes, each about five times the one before. The last is `largest`."""
    return [max(largest // divisor, 10) for divisor in (125, 25, 5, 1)]


def exponent(points: dict[int, float]) -> float:
    """Return the slope of a line fitted to the logarithms. It is 0 if a small run has only one size."""
    if len(points) == 1:
        return 0.0
    logs = [(math.log(size), math.log(max(value, 1e-9))) for size, value in points.items()]
    x, y = (statistics.fmean(column) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def median_ms(call: Callable[[int], object], numbers: itertools.count[int]) -> float:
    """Return the median milliseconds of a call with the next number as its argument."""
    took = []
    for _ in range(TIMES):
        number = next(numbers)
        begun = time.perf_counter()
        call(number)
        took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e3


def pending(url: str, largest: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a staged save and of ``exists`` by the number of pending files."""
    fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack="staged")
    fs.pipe_file(f"{root}/first", b"x")
    flusher = fs.status(root)["flusher"]["pid"]
    os.kill(flusher, signal.SIGSTOP)
    numbers, saves, looks = itertools.count(), {}, {}
    try:
        for size in sizes(largest):
            while (number := next(numbers)) < size:
                fs.pipe_file(f"{root}/d{number % 7}/f{number}", b"y" * 1000)
            saves[size] = median_ms(lambda number: fs.pipe_file(f"{root}/d0/f{number}", b"z" * 1000), numbers)
            looks[size] = median_ms(lambda number: fs.exists(f"{root}/d0/none{number}"), numbers)
    finally:
        os.kill(flusher, signal.SIGKILL)
    return {"staged save, ms": saves, "exists, ms": looks}


def lists(largest: int) -> dict[int, float]:
    """Return the flusher's LIST requests for each new file to find its parent. A file appears every 10 ms."""
    found = {}
    for size in sizes(largest):
        objects, clock = MeasuredObjects(MemoryObjects(f"/growth-{size}")), ManualClock()
        descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, objects.capabilities)
        objects.put(keys.DESCRIPTOR, [descriptor.encode()])
        listed = ListedNames(Store(objects, descriptor, url="memory", clock=clock))
        for number in range(size):
            record = Manifest(Kind.FILE, bytes(16), 0, 0, 0, DigestKind.XXH3_128, bytes(16))
            find_parent(listed, Draft(f"run/part-{number}-{size}", record, ObservedBase(None)))
            clock.sleep(0.01)
        found[size] = objects.snapshot()["list"]["requests"] / size
    return found


def staging(url: str, largest: int) -> dict[int, float]:
    """Return the time to stage a state of up to 4 N tensors, relative to copying them into reused memory."""
    found = {}
    for size in sizes(4 * largest):
        state = {f"layer{number}": torch.randn(1000) for number in range(size)}
        kept = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        writer, ratios = TierWriter(f"tierfs::{url}/state-{size}", ack="staged"), []
        for _ in range(5):
            for tensor in state.values():
                tensor.add_(1)
            begun = time.perf_counter()
            for name, tensor in state.items():
                kept[name].copy_(tensor)
            copied = time.perf_counter()
            writer.stage(state)
            ratios.append((time.perf_counter() - copied) / (copied - begun))
        found[size] = statistics.median(ratios[1:])
    return found


def overwritten(url: str, largest: int) -> dict[int, float]:
    """Return the number of files in a directory after so many saves to it, at five saves a grace."""
    fs, root = fsspec.url_to_fs(f"tierfs::{url}")
    found, saves = {}, 0
    for size in (5, 10, 20, max(largest // 250, 40)):
        while saves < size:
            writer = TierWriter(f"tierfs::{url}/last", ack="staged")
            dcp.save({"weight": torch.full((1000,), float(saves))}, storage_writer=writer, no_dist=True)
            writer.wait("object")
            saves += 1
            time.sleep(GRACE_S / 5)
        found[size] = float(len(fs.find(f"{root}/last")))
    return found


def simulated(size: int, each: int = 1) -> Store:
    """Return a remote store with `size` directories in one directory, each with `each` files."""
    objects = MeasuredObjects(_Far(MemoryObjects(f"/growth-{size}-{each}")))
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, objects.capabilities)
    objects.put(keys.DESCRIPTOR, [descriptor.encode()])
    for number in range(size * each):
        path, content = f"run/step {number // each}/part-{number:07}", os.urandom(16)
        digest = content_digest(DigestKind.XXH3_128, 1000, [content])
        rows = (Row(ChunkName(content), 1000, 1000),)
        record = Manifest(Kind.FILE, bytes(16), 1000, 0, 0, DigestKind.XXH3_128, digest, rows)
        objects.put(keys.record_key(path), [record.encode(path)])
    return Store(objects, descriptor, url="memory")


class _Far(WrappedObjects):
    """A tier that is not local to the host."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, host_local=False)


def listings(largest: int) -> dict[str, dict[int, float]]:
    """Return requests and times of listings by the number of directories and of names."""
    asked: dict[int, float] = {}
    name_us: dict[int, float] = {}
    again: dict[int, float] = {}
    for size in sizes(largest):
        store = simulated(size)
        asked[size] = requests(store, "list", lambda store=store: list_directory(store, "run", detail=False))
        store = simulated(size, 10)
        whole = cpu_s(lambda store=store: find(store, "run", detail=False))
        listed = cpu_s(lambda store=store: list(store.objects.list(keys.directory_prefix("run"))))
        name_us[10 * size] = (whole - listed) * 1e6 / (10 * size)
        find(store, "run")
        again[10 * size] = requests(store, "read", lambda store=store: find(store, "run"))
        MemoryFileSystem.store.clear()
    return {"LIST of ls, N directories": asked, "find, us a name": name_us, "records read again": again}


def cpu_s(call: Callable[[], object]) -> float:
    """Return the least processor seconds of three calls."""
    took = []
    for _ in range(3):
        begun = time.process_time()
        call()
        took.append(time.process_time() - begun)
    return min(took)


def requests(store: Store, method: str, call: Callable[[], object]) -> float:
    objects = store.objects
    assert isinstance(objects, MeasuredObjects)
    before = objects.snapshot()[method]["requests"]
    call()
    return float(objects.snapshot()[method]["requests"] - before)


def metadata(largest: int) -> dict[str, dict[int, float]]:
    """Return one rank's processor seconds to locate its part of 300 tensors, relative to unpickling and in all."""
    ratios: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for ranks in sizes(max(largest // 10, 10) if largest < 10_000 else 1024):
        whole, note = made_up(ranks, 300)
        document, pickled = encode(whole, note), pickle.dumps(whole)
        begun = time.process_time()
        read = mark_absent(decode(document, "made up")[0])
        for fqn, item in read.state_dict_metadata.items():
            read.storage_data[MetadataIndex(fqn, item.chunks[ranks // 2].offsets)]
        seconds[ranks] = time.process_time() - begun
        begun = time.process_time()
        pickle.loads(pickled)
        ratios[ranks] = seconds[ranks] / (time.process_time() - begun)
    return {"metadata, of unpickling": ratios, "metadata, CPU s a rank": seconds}


def made_up(ranks: int, tensors: int) -> tuple[Metadata, CheckpointNote]:
    """Return the metadata of a checkpoint in which each rank has some rows of each tensor."""
    names = [f"rank-{rank:05}-{os.urandom(4).hex()}.safetensors" for rank in range(ranks)]
    items: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, BytesPlace] = {}
    ends = [0] * ranks
    for number in range(tensors):
        fqn, rows, columns = (
            f"model.layers.{number // 12}.part{number % 12}.weight",
            1 + number % 4,
            1024 * (1 + number % 3),
        )
        chunks = []
        for rank, name in enumerate(names):
            chunk = ChunkStorageMetadata(torch.Size((rows * rank, 0)), torch.Size((rows, columns)))
            places[MetadataIndex(fqn, chunk.offsets)] = BytesPlace(name, ends[rank], 4 * rows * columns)
            ends[rank] += 4 * rows * columns
            chunks.append(chunk)
        shape = torch.Size((rows * ranks, columns))
        items[fqn] = TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)
    paths = {fqn: tuple(fqn.split(".")) for fqn in items}
    return Metadata(items, paths, places), CheckpointNote("ab", 1, 1, 1, dict(zip(names, ends, strict=True)))


def queues(largest: int) -> dict[str, dict[int, float]]:
    """Return the microseconds of a step of the flusher's queue, and of an eviction's hold on the nvme tier's tables."""
    steps: dict[int, float] = {}
    locked: dict[int, float] = {}
    record = Manifest(Kind.FILE, bytes(16), 0, 0, 0, DigestKind.XXH3_128, bytes(16))
    for size in sizes(largest):
        queue = FlushQueue()
        for number in range(size):
            draft = Draft(
                f"run/d{number % 7}/f{number}",
                replace(record, write_id=number.to_bytes(16, "little")),
                ObservedBase(None),
            )
            queue.add(FlushItem(draft, (1, number, 0), 0.0, number=number, past_nvme=True, retry_at=float("inf")))
        numbers = itertools.count(size)

        def step(number: int, queue: FlushQueue = queue) -> None:
            draft = Draft("run/d0/new", replace(record, write_id=number.to_bytes(16, "little")), ObservedBase(None))
            entry = FlushItem(draft, (1, number, 0), 0.0)
            queue.add(entry)
            queue.waiting(100)
            queue.follows_passed(entry)
            queue.pass_nvme(entry)
            queue.next_ready(0.0)
            queue.remove(entry)

        steps[size] = median_ms(step, numbers) * 1e3
        ledger = Ledger(20 * size * GRANULE, 20 * size * GRANULE)
        rows = {
            number.to_bytes(16, "little"): Extent(GRANULE * number, GRANULE, GRANULE, number)
            for number in range(10 * size)
        }
        ledger.chunks = rows
        order = candidates(rows.items(), np.zeros(20 * size, np.uint32))

        def evict(_: int, ledger: Ledger = ledger, order: deque[EvictionCandidate] = order) -> None:
            ledger.victims(4 * GRANULE, order, lambda _: 0, 1e9)

        locked[10 * size] = median_ms(evict, itertools.count()) * 1e3
    return {"step of the flusher's queue, us": steps, "eviction with the tables locked, us": locked}


def host(largest: int) -> dict[str, dict[int, float]]:
    most = min(largest // 25, 400)
    some = [max(most // divisor, 1) for divisor in (27, 9, 3, 1)]
    count = 4 if largest >= SMALL_LARGEST else 2  # the smallest run only shows that everything works
    rows = shared_memory(some[-count:]) | small_files(some[-count:])
    rows |= waves([2, 4, 8, 16][:count]) | flushers([1, 2, 4, 8][:count]) | looks(sizes(largest))
    try:
        return rows | first_save([1, 4, 16, 64][:count])
    except ModuleNotFoundError as error:
        print(f"no first saves to S3: {error}", file=sys.stderr)
        return rows


def note_host_aims(aims: Aims, rows: dict[str, dict[int, float]]) -> None:
    """Compare the largest size of each row of `growth_host` with its aim."""
    last = {name: list(points.values())[-1] for name, points in rows.items()}
    aims.at_most("store with one small file, MiB of shared memory", last["store with 100 KB, MiB of shared memory"], 4)
    aims.at_most("shared memory less 64 MiB, of the state", last["state, of it in shared memory, - 64 MiB"], 2)
    aims.at_most("staged, ms a file", last["staged, ms a file"], 0.5)
    aims.at_most("local, ms a file", last["local, ms a file"], 2)
    aims.at_most("staged, then one wait for local, ms a file", last["staged, then one wait for local, ms a file"], 0.4)
    aims.at_most("waves: bytes sent, of the state", last["waves: bytes sent, of the state"], 1.01)
    aims.at_most("waves: private memory, of the ram tier", last["waves: private memory kept beside it, MiB"] / 32, 1)
    if "first save until in S3, s" in last:
        more = last["first save until in S3, s"] - last["second save until in S3, s"]
        aims.at_most("first save to S3, s more than the second", more, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    largest = arguments.largest
    rows: dict[str, dict[int, float]] = {}
    directory = tempfile.mkdtemp(prefix="tierfs-bench-", dir="/dev/shm")
    atexit.register(shutil.rmtree, directory)  # registered first, so it runs after tierfs has written its last there
    os.environ |= {
        "TIERFS_STATE_DIR": f"{directory}/state",
        "TIERFS_SHM_DIR": directory,
        "TIERFS_RAM": "2GiB",
        "TIERFS_NVME": "0",
    }
    urls = [f"file://{Path(directory)}/{name}" for name in ("pending", "staging", "overwritten")]
    for url in urls:
        tierfs.init(url, lease_s=1, grace_s=GRACE_S)
    rows |= pending(urls[0], largest)
    rows["LIST a new file"] = lists(largest)
    rows["staging, of a copy of each tensor"] = staging(urls[1], largest)
    rows["files in last/"] = overwritten(urls[2], largest)
    for store in Path(directory, "state", "stores").iterdir():  # one flusher may still be at work on pending files
        stop_flusher(store, tierfs.__version__, timeout_s=120)
    rows |= listings(largest)
    rows |= metadata(largest)
    rows |= queues(largest)
    of_host = host(largest)
    rows |= of_host
    exponents = {name: exponent(points) for name, points in rows.items()}
    aims = Aims()
    for name in ("staged save, ms", "exists, ms"):
        aims.at_most(f"{name}, with {largest} pending", rows[name][largest], 2)
    aims.at_most("LIST a new file", rows["LIST a new file"][largest], 0.1)
    aims.at_most("exponent of the files in last/", exponents["files in last/"], 0.5)
    aims.at_most(f"LIST of ls, {largest} directories", rows["LIST of ls, N directories"][largest], 3)
    aims.at_most(f"find, us a name of {10 * largest}", rows["find, us a name"][10 * largest], 3)
    aims.at_most(f"records read again, of {10 * largest}", rows["records read again"][10 * largest], 0)
    ranks = max(rows["metadata, CPU s a rank"])
    aims.at_most(f"metadata of {ranks} ranks x 300 tensors, CPU s a rank", rows["metadata, CPU s a rank"][ranks], 1)
    aims.at_most(f"a look for one new file, ms, {largest} pending", rows["a look for one new file, ms"][largest], 1)
    for name in ("step of the flusher's queue, us", "eviction with the tables locked, us"):
        aims.at_most(f"exponent of the {name}", exponents[name], 0.2)
    note_host_aims(aims, of_host)
    report = {"date": time.strftime("%Y-%m-%d"), "rows": rows, "exponents": exponents, "aims": aims.found}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, points in rows.items():
        values = "".join(f"{size:>8}: {value:<9.3g}" for size, value in points.items())
        print(f"{name:44}{values} exponent {exponents[name]:5.2f}")
    show(aims.found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
