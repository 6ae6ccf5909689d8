"""What `codec.py` measures of codecs in processes instead of threads, which share one interpreter lock: alone, and as the flusher has them encode."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from codec_speed import BLOCKS, CASES, ROOM_BYTES, Case, Threads, digest_of
from dcp_session import timed

from tierfs.buffers import fresh
from tierfs.codec import Reason
from tierfs.codec.workers import encode_workers
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encode.desks import desks
from tierfs.store.encode.pipeline import Plan, encode_chunk

PROCESSES = CHUNKS = 2
WARM_UPS = 2
WAYS = ("encode", "decode")
# Of the cases: its place in their list, and the way.
_Job = tuple[int, str]


def report(cases: dict[tuple[str, str], Case], rounds: int) -> dict[str, dict[str, float]]:
    """By codec and way, how many times as fast two processes are as one, and as two threads, with all classes; in turns, medians.

    The processes have the blocks already: what it would take to send them there is not counted. To be called before there are threads.
    """
    tasks = list(cases.values())
    numbers = {codec.name: [at for at, key in enumerate(cases) if key[0] == codec.name] for codec in CASES}
    context = multiprocessing.get_context("fork")
    workers: list[Connection] = []
    processes = []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        processes.append(context.Process(target=_work, args=(there, tasks, number)))
        processes[-1].start()
        workers.append(here)
    threads = Threads()
    found: dict[str, list[tuple[float, float]]] = {}
    try:
        for round_ in range(WARM_UPS + rounds):
            for codec, indices in numbers.items():
                for way in WAYS:
                    of_threads = sum(threads.seconds(getattr(tasks[at], way), PROCESSES) for at in indices)
                    one, both = (sum(_seconds(workers[:count], (at, way)) for at in indices) for count in (1, 2))
                    if round_ >= WARM_UPS:
                        found.setdefault(f"{codec} {way}", []).append((one / both, of_threads / both))
    finally:
        threads.close()
        for worker in workers:
            worker.send(None)
        for process in processes:
            process.join()
    return {
        name: dict(zip(("over 1", "over 2 threads"), map(statistics.median, zip(*pairs, strict=True)), strict=True))
        for name, pairs in found.items()
    }


class _Chunks:
    """The blocks of a case as two chunks in memory that is shared.

    Args:
        case: What is encoded.
    """

    def __init__(self, case: Case) -> None:
        self._coding = case.coding
        self._digests = case.digests
        self._raw = _copied(case.raws)
        self._base = _copied([base for base in case.bases if base is not None])

    def encode(self, _: memoryview, begin: int, step: int) -> None:
        """Encode both, or one of them, as who flushes does: the digests are this process's work."""
        count = len(self._digests)
        half = -(-count // CHUNKS)
        for first in range(begin * half, count, step * half):
            blocks = range(first, min(first + half, count))
            raw = self._raw[first * BLOCK_BYTES : blocks.stop * BLOCK_BYTES]
            for number in blocks:
                block = self._raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
                assert digest_of(block) == self._digests[number]
            plans = [Plan(self._coding, Reason.NO_BASE, self._base_of(number)) for number in blocks]
            with desks().lend() as desk:
                encode_chunk(raw, plans, desk)

    def _base_of(self, number: int) -> memoryview | None:
        return self._base[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] if self._base else None


def report_workers(cases: dict[tuple[str, str], Case], rounds: int) -> dict[str, float]:
    """By codec, how many times as fast two threads are with the flusher's processes that encode as one thread without; in turns, medians."""
    found: dict[str, list[float]] = {}
    with encode_workers().allowed():
        threads = Threads()
        try:
            tasks = [(key[0], case, _Chunks(case)) for key, case in cases.items()]
            while encode_workers().status().get("workers", 0) < PROCESSES:
                for _, _, chunks in tasks:
                    threads.seconds(chunks.encode, 2)
            for round_ in range(WARM_UPS + rounds):
                for codec in CASES:
                    of_codec = [(case, chunks) for name, case, chunks in tasks if name == codec.name]
                    one = sum(threads.seconds(case.encode, 1) for case, _ in of_codec)
                    both = sum(threads.seconds(chunks.encode, 2) for _, chunks in of_codec)
                    if round_ >= WARM_UPS:
                        found.setdefault(codec.name, []).append(one / both)
        finally:
            threads.close()
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def _copied(blocks: Sequence[memoryview]) -> memoryview:
    memory = fresh(max(len(blocks), 1) * BLOCK_BYTES)
    for number, block in enumerate(blocks):
        memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = block
    return memory[: len(blocks) * BLOCK_BYTES]


def _seconds(workers: list[Connection], job: _Job) -> float:
    """What it takes these to do all blocks of a case."""

    def all_of_it() -> None:
        for worker in workers:
            worker.send((*job, len(workers)))
        for worker in workers:
            worker.recv()

    return timed(all_of_it)


def _work(pipe: Connection, tasks: list[Case], number: int) -> None:
    room = memoryview(np.ones(ROOM_BYTES, np.uint8))
    assert BLOCKS % PROCESSES == 0
    while (job := pipe.recv()) is not None:
        at, way, count = job
        getattr(tasks[at], way)(room, number, count)
        pipe.send(None)
