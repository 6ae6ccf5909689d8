"""What `codec.py` measures of encoding in processes instead of threads, which share one interpreter lock."""

from __future__ import annotations

import multiprocessing
import statistics
from multiprocessing.connection import Connection

import numpy as np
from codec_speed import BLOCKS, ROOM_BYTES, Case, Threads
from dcp_session import timed

CODECS = ("PLANE", "DPLANE")
KIND = "w32"
PROCESSES = 2
WARM_UPS = 2


def report(cases: dict[tuple[str, str], Case], rounds: int) -> dict[str, float]:
    """By codec, how many times as fast two processes encode float32 weights as two threads do, both in turns.

    The processes have the blocks already: what it would take to send them there is not counted. To be called before there are threads.
    """
    tasks = [cases[codec, KIND] for codec in CODECS]
    context = multiprocessing.get_context("fork")
    workers: list[Connection] = []
    processes = []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        processes.append(context.Process(target=_work, args=(there, tasks, number)))
        processes[-1].start()
        workers.append(here)
    threads = Threads()
    found: dict[str, list[float]] = {codec: [] for codec in CODECS}
    try:
        for _ in range(WARM_UPS + rounds):
            for index, (codec, task) in enumerate(zip(CODECS, tasks, strict=True)):
                alone = threads.seconds(task.encode, PROCESSES)
                found[codec].append(alone / timed(lambda index=index: _do(workers, index)))  # type: ignore[misc]
    finally:
        threads.close()
        for worker in workers:
            worker.send(None)
        for process in processes:
            process.join()
    return {codec: statistics.median(ratios[WARM_UPS:]) for codec, ratios in found.items()}


def _do(workers: list[Connection], index: int) -> None:
    for worker in workers:
        worker.send(index)
    for worker in workers:
        worker.recv()


def _work(pipe: Connection, tasks: list[Case], number: int) -> None:
    room = memoryview(np.ones(ROOM_BYTES, np.uint8))
    assert BLOCKS % PROCESSES == 0
    while (index := pipe.recv()) is not None:
        tasks[index].encode(room, number, PROCESSES)
        pipe.send(None)
