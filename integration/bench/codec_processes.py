"""Codecs in processes for `codec.py`. Unlike threads, processes do not share an interpreter lock."""

from __future__ import annotations

import multiprocessing
import statistics
from multiprocessing.connection import Connection

import numpy as np
from codec_speed import BLOCKS, CASES, ROOM_BYTES, Case, Threads
from dcp_session import timed

PROCESSES = 2
WARM_UPS = 2
WAYS = ("encode", "decode")
# Index of the case, and the way.
_Job = tuple[int, str]


def report(cases: dict[tuple[str, str], Case], rounds: int) -> dict[str, dict[str, float]]:
    """Return the speed of two processes over one, and over two threads, for each codec and way, with all classes.

    Measurements alternate, and each figure is a median. The processes inherit the blocks by fork, so the cost to
    send blocks does not count. Call this before the process has threads.
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


def _seconds(workers: list[Connection], job: _Job) -> float:
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
