"""How costs grow: each row at four sizes in one run, and the exponent of a power of the size that fits them best.

    python integration/bench/growth.py [--largest 10000] [--json]

An exponent of 0 is flat, 1 is linear. Rows, all in one process and one store on tmpfs with the ram tier alone:

- a staged save, and looking whether a file exists, while N files are pending (the flusher is stopped);
- LIST requests of the flusher for each of N new files of 100 KiB in one directory;
- staging a state of N tensors of 4 KB, of copying them into memory that is kept;
- files in ``last/`` after N saves to it, with the shortest grace.

With ``--largest 10000`` it takes a minute; ``--largest 1000`` is the smallest size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from aims import Aims, show

import tierfs
from tierfs.clock import ManualClock
from tierfs.dcp import TierWriter
from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.header import Kind
from tierfs.format.manifest import Manifest
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.store import Store
from tierfs.store.encode.parents import ListedNames, find_parent

TIMES = 15
GRACE_S = 2


def sizes(largest: int) -> list[int]:
    """Four sizes, the largest last, each about a fifth of the next."""
    return [max(largest // divisor, 10) for divisor in (125, 25, 5, 1)]


def exponent(points: dict[int, float]) -> float:
    """The slope of a straight line through the logarithms."""
    logs = [(math.log(size), math.log(max(value, 1e-9))) for size, value in points.items()]
    x, y = (statistics.fmean(column) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def median_ms(call: Callable[[int], object], numbers: itertools.count[int]) -> float:
    """Milliseconds of a call with the next number."""
    took = []
    for _ in range(TIMES):
        number = next(numbers)
        begun = time.perf_counter()
        call(number)
        took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e3


def pending(url: str, largest: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a staged save and of ``exists``, by the number of pending files."""
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
    """LIST requests a file that the flusher makes to find what a new one comes after; a file every 10 ms."""
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
    """Time to stage a state of so many tensors, of a copy of each into memory that is kept."""
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
    """Files in a directory after so many saves to it, five a grace."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    largest, rows = arguments.largest, {}
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm") as directory:
        os.environ |= {"TIERFS_STATE_DIR": f"{directory}/state", "TIERFS_RAM": "2GiB", "TIERFS_NVME": "0"}
        urls = [f"file://{Path(directory)}/{name}" for name in ("pending", "staging", "overwritten")]
        for url in urls:
            tierfs.init(url, lease_s=1, grace_s=GRACE_S)
        rows |= pending(urls[0], largest)
        rows["LIST a new file"] = lists(largest)
        rows["staging, of a copy of each tensor"] = staging(urls[1], largest)
        rows["files in last/"] = overwritten(urls[2], largest)
    exponents = {name: exponent(points) for name, points in rows.items()}
    aims = Aims()
    for name in ("staged save, ms", "exists, ms"):
        aims.at_most(f"{name}, with {largest} pending", rows[name][largest], 2)
    aims.at_most("LIST a new file", rows["LIST a new file"][largest], 0.1)
    aims.at_most("exponent of the files in last/", exponents["files in last/"], 0.5)
    report = {"rows": rows, "exponents": exponents, "aims": aims.found}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, points in rows.items():
        values = "".join(f"{size:>8}: {value:<9.3g}" for size, value in points.items())
        print(f"{name:36}{values} exponent {exponents[name]:5.2f}")
    show(aims.found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
