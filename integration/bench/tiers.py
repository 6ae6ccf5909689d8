"""The local tiers: copies, levels, reads, and their cost to the process that writes.

    python integration/bench/tiers.py [--mib 2048] [--rounds 5] [--directory DIR] [--json]

Measurements alternate. Figures are medians of the rounds after the first, which warms up slabs, the disk
blocks and the buffers, as in a long-running job. The store is a directory on the same disk with an nvme tier in front
of it. "memcpy" is ``numpy.copyto`` between two warm buffers. "direct" is a loop of 16 MiB O_DIRECT writes and one
fdatasync, or of reads, on a preallocated file that was written before. Content is random and new in each round, so
nothing is deduplicated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from harness import SEED, parser, peaks, proc_number, say, timed

import tierfs
from tierfs.clock import SystemClock
from tierfs.digest import CHUNK_BYTES
from tierfs.host.host import Host
from tierfs.host.nvme.tier import NvmeTier
from tierfs.threads import processors

PIECE = 16 << 20


class Direct:
    """A plain loop over a preallocated file, past the page cache."""

    def __init__(self, path: Path, size: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size)
        self._piece = mmap.mmap(-1, PIECE)
        self._piece[:] = os.urandom(1 << 20) * (PIECE >> 20)
        self._size = size

    def write(self) -> None:
        for offset in range(0, self._size, PIECE):
            os.pwrite(self._fd, self._piece, offset)
        os.fdatasync(self._fd)

    def read(self) -> None:
        for offset in range(0, self._size, PIECE):
            os.preadv(self._fd, [self._piece], offset)


def fresh(buffer: np.ndarray, generator: np.random.Generator) -> None:
    words = buffer.view(np.uint64)
    step = PIECE // 8
    noise = generator.integers(0, 2**63, step, dtype=np.uint64)
    for at in range(0, len(words), step):
        np.add(noise, np.uint64(at + generator.integers(0, 2**62)), out=words[at : at + step])


def copy_into_slab(tiers: Any, source: np.ndarray, share_out: Callable[..., None]) -> None:
    """Reserve slots for the bytes, copy the bytes there, and release the slots."""
    view, slots = memoryview(source), []

    def copy(at: int) -> None:
        chunk = tiers.writer.begin_chunk(timeout_s=60)
        chunk.append(view[at : at + CHUNK_BYTES])
        slots.append(chunk.slot)

    share_out(copy, range(0, len(view), CHUNK_BYTES))
    for slot in slots:
        tiers.writer.drop(slot)


def one_by_one(task: Callable[[int], None], arguments: range) -> None:
    """Call the task for each argument on this thread."""
    for argument in arguments:
        task(argument)


def large_index(root: Path, chunks: int, rounds: int) -> dict[str, float]:
    """Time new processes that open the store and read a small file, or ask for its status.

    The store's nvme tier holds ``chunks`` chunks of 4 KiB. The time starts when fsspec and numpy are imported. In rows
    named ``process`` it starts before the process.
    """
    store = tierfs.init(f"file://{root}/indexed")
    fs, path = fsspec.url_to_fs(f"tierfs::file://{root}/indexed/small")
    fs.pipe(path, b"x")
    host = Host(Path(os.environ["TIERFS_STATE_DIR"]))
    nvme = NvmeTier(host.store_directory(store.descriptor.uuid), budget_bytes=(chunks + 64) << 16, clock=SystemClock())
    page = memoryview(mmap.mmap(-1, 4096))
    for number in range(chunks):
        nvme.write(number.to_bytes(17, "big"), b"", page, keep=False)
    nvme.commit([])  # readers see the chunks' number
    script = (
        "import sys, time, fsspec, numpy\n"
        "begin = time.perf_counter()\n"
        f"fs, path = fsspec.url_to_fs(sys.argv[1], nvme={(chunks + 64) << 16}, ram='64MiB')\n"
        "assert fs.cat(path) == b'x' if sys.argv[2] == 'open' else fs.status(path)['tiers']['nvme']['chunks']\n"
        "print(time.perf_counter() - begin)\n"
    )
    seconds: dict[str, list[float]] = {}
    for name in ("open", "status") * rounds:
        command = [sys.executable, "-c", script, f"tierfs::file://{path}", name]
        begin = time.perf_counter()
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds.setdefault(f"{name} process", []).append(time.perf_counter() - begin)
        seconds.setdefault(name, []).append(float(out))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=2048)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--chunks", type=int, default=100_000, help="chunks in the index of the last measurement")
    options = arguments.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=options.directory))
    size, half = options.mib << 20, options.mib << 19
    shared = tempfile.mkdtemp(prefix="tierfs-bench-", dir="/dev/shm")
    os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"] = str(root / "state"), shared
    generator = np.random.default_rng(SEED)
    source, target = np.ones(half, np.uint8), np.ones(half, np.uint8)
    rows: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        rows.setdefault(name, []).append(seconds)

    watches = contextlib.ExitStack()
    try:
        tierfs.init(f"file://{root}/store")
        url = f"tierfs::file://{root}/store"
        fs, path = fsspec.url_to_fs(url, ack="staged", ram=f"{options.mib * 5 // 2}MiB", nvme=f"{options.mib * 2}MiB")
        direct = Direct(root / "direct", size)
        tiers = fs._locate(path)[0].tiers
        parts = [f"{path}/a", f"{path}/b"]
        watched: dict[str, int] | None = None
        for number in range(options.rounds + 1):
            fresh(source, generator)
            note("memcpy", timed(partial(np.copyto, target, source)))
            note("copy into warm slab", timed(partial(copy_into_slab, tiers, source, processors().share_out)))
            note("copy into warm slab, one thread", timed(partial(copy_into_slab, tiers, source, one_by_one)))
            handle = fs.open(parts[0], "wb")
            note("write()", timed(partial(handle.write, source)))
            begin = time.perf_counter()
            handle.close()
            rows["staged"] = [
                *rows.get("staged", []),
                rows["write()"][-1] + time.perf_counter() - begin,
            ]
            note("read from ram while the flusher works", timed(lambda: fs.open(parts[0]).readinto(target)))
            assert np.array_equal(source, target)
            fs.wait(path, "object")
            note("memcpy", timed(partial(np.copyto, target, source)))
            note("read from ram", timed(lambda: fs.open(parts[0]).readinto(target)))
            assert np.array_equal(source, target)
            fresh(source, generator)
            with fs.open(parts[1], "wb") as other:
                other.write(source)
            fs.wait(path, "object")
            # Write both files again with new content, so that the nvme tier and the slabs are full of warm memory.
            fresh(source, generator)
            note("direct write", timed(direct.write))
            begin = time.perf_counter()
            for part in parts:
                with fs.open(part, "wb") as file:
                    file.write(source)
                source += np.uint8(1)
            staged = time.perf_counter()
            used = time.process_time()
            fs.wait(path, "local")
            note("two files staged, then local", time.perf_counter() - begin)
            note("from staged to local", time.perf_counter() - staged)
            pid = fs.status(path)["flusher"].get("pid")
            if watched is None and pid:
                watched = watches.enter_context(peaks(0.02, anon=partial(proc_number, pid, "status", "RssAnon")))
            fs.wait(path, "object")
            wall, cpu = time.perf_counter() - staged, time.process_time() - used
            note("writer's cpu share while the flusher works", cpu / wall)
            fs.evict(f"{path}/a", "ram")
            note("direct read", timed(direct.read) / 2)
            source -= np.uint8(2)
            note("read from nvme", timed(lambda: fs.open(parts[0]).readinto(target)))
            assert np.array_equal(source, target)
            if number == 0:
                rows.clear()
        own_anon = (proc_number("self", "status", "RssAnon") - 2 * half) / (1 << 20)
        flusher_anon = watched["anon"] / (1 << 20) if watched is not None else float("nan")
        status = fs.status(path)
        index = large_index(root, options.chunks, options.rounds)
    finally:
        watches.close()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    result = {
        "copy into warm slab / memcpy": medians["memcpy"] / medians["copy into warm slab"],
        "the same on one thread / memcpy": medians["memcpy"] / medians["copy into warm slab, one thread"],
        "write() / memcpy": medians["memcpy"] / medians["write()"],
        "staged / memcpy": medians["memcpy"] / medians["staged"],
        "from staged to local / direct write": medians["direct write"] / medians["from staged to local"],
        "read from ram / memcpy": medians["memcpy"] / medians["read from ram"],
        "the same while the flusher works / memcpy": medians["memcpy"]
        / medians["read from ram while the flusher works"],
        "read from nvme / direct read": medians["direct read"] / medians["read from nvme"],
        "writer's cpu share": medians["writer's cpu share while the flusher works"],
        "writer's own memory MiB": own_anon,
        "flusher's memory MiB": flusher_anon,
        **{f"{name}, {options.chunks} chunks in the index, seconds": value for name, value in index.items()},
    }
    report = {"mib": options.mib, "rounds": options.rounds, "seed": SEED, "seconds": medians, "result": result}
    say(report | ({"status": status} if options.json else {}), as_json=options.json)


if __name__ == "__main__":
    main()
