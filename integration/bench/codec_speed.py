"""Speeds for `codec.py`: one thread and two encode and decode blocks of real states, digests included."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from codec_states import steps_of
from harness import SEED, timed

from tierfs.codec import Codec, Coding, decode_block, encode_block, encode_blocks, frames
from tierfs.digest import BLOCK_BYTES, DigestKind, hash_bytes

# Blocks of a class of tensors. The blocks of all classes exceed the processor's caches.
BLOCKS = 24
COPY_BYTES = 256 << 20
ROOM_BYTES = Coding(Codec.PLANE).together * BLOCK_BYTES
WARM_UPS = 2
PROCESSES = 2
WAYS = ("encode", "decode")
# A shared machine is quiet only now and then. A round counts if two threads speed up zstd's Huffman coder, which
# needs whole cores and no interpreter, by this factor. (sha256 waits for its own results, so it would gain as much
# from two hyperthreads of one core.)
QUIET_GAIN = 1.8
GAUGE_VALUES = 64
QUIET_ROUNDS_MIN = 5
TRIES = 4
SCALE = 10.0
RUN = "fp32master"
LATE, LATER = 4, 6
# The classes of each codec. A moment has nothing in common with itself ten steps before, so it has no delta.
CASES = {
    Codec.PLANE: {"w32": 4, "m": 4, "v": 4, "w16": 2},
    Codec.DPLANE: {"w32": 4, "v": 4, "w16": 2},
}
Key = tuple[str, str, str]
Taken = dict[Key, tuple[int, float, float]]
# Index of the case, and the way.
_Job = tuple[int, str]
digest_of = partial(hash_bytes, DigestKind.XXH3_128)


@dataclass
class Case:
    """Blocks of one class of tensors, for one codec.

    Attributes:
        coding: How the blocks are encoded.
        raws: The raw blocks.
        bases: The base of each block, or None.
        digests: Digest of each raw block.
        encoded: Codec and encoded bytes of each block.
        outs: The buffer that each block is decoded into.
    """

    coding: Coding
    raws: list[memoryview]
    bases: Sequence[memoryview | None]
    digests: list[bytes] = field(default_factory=list)
    encoded: list[tuple[Codec, memoryview]] = field(default_factory=list)
    outs: list[memoryview] = field(default_factory=list)

    def __post_init__(self) -> None:
        room = memoryview(bytearray(BLOCK_BYTES))
        target = memoryview(np.ones(len(self.raws) * BLOCK_BYTES, np.uint8))
        for number, (raw, base) in enumerate(zip(self.raws, self.bases, strict=True)):
            codec, length = encode_block(raw, self.coding, base, room)
            self.digests.append(digest_of(raw))
            self.encoded.append((codec, memoryview(bytes(raw if codec == Codec.STORE else room[:length]))))
            self.outs.append(target[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])

    @property
    def size(self) -> int:
        return sum(map(len, self.raws))

    @property
    def ratio(self) -> float:
        return sum(len(data) for _, data in self.encoded) / self.size

    def encode(self, room: memoryview, begin: int, step: int) -> None:
        """Encode every `step`-th group of blocks. Groups are as large as the flusher's."""
        count = self.coding.together
        for first in range(begin * count, len(self.raws), step * count):
            raws = self.raws[first : first + count]
            for raw, digest in zip(raws, self.digests[first : first + count], strict=True):
                assert digest_of(raw) == digest
            outs = [room[index * BLOCK_BYTES :] for index in range(len(raws))]
            encode_blocks(raws, self.coding, self.bases[first : first + count], outs)

    def decode(self, room: memoryview, begin: int, step: int) -> None:
        """Decode every `step`-th block, as a reader does."""
        for number in range(begin, len(self.raws), step):
            codec, data = self.encoded[number]
            decode_block(codec, data, self.outs[number], self.bases[number], "bench")
            assert digest_of(self.outs[number]) == self.digests[number], "what was decoded is not what was encoded"


@dataclass
class Sample:
    """One round.

    Attributes:
        gain: Speed of Huffman coding on two threads over one.
        copy: Bytes per second of memcpy.
        taken: For each key: bytes, seconds of one thread, and seconds of two.
    """

    gain: float
    copy: float
    taken: Taken

    @property
    def is_quiet(self) -> bool:
        return self.gain >= QUIET_GAIN


class Threads:
    """Two long-lived threads, each with its own warm memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._rooms = [memoryview(np.ones(ROOM_BYTES, np.uint8)) for _ in range(2)]
        self._gauge = np.random.default_rng(0).integers(0, GAUGE_VALUES, BLOCK_BYTES, np.uint8).data

    def seconds(self, task: Callable[[memoryview, int, int], None], count: int) -> float:
        """Time `count` threads that share a task."""

        def all_of_it() -> None:
            begun = [self._pool.submit(task, self._rooms[number], number, count) for number in range(count)]
            for future in begun:
                future.result()

        return timed(all_of_it)

    def gain(self) -> float:
        """Return the speed of two threads over one in Huffman coding, which needs no interpreter.

        It shows how many cores there are and how quiet they are.
        """

        def code_blocks(_: memoryview, begin: int, step: int) -> None:
            for _ in range(begin, BLOCKS, step):
                frames.pack_plane(self._gauge)

        return self.seconds(code_blocks, 1) / self.seconds(code_blocks, 2)

    def close(self) -> None:
        self._pool.shutdown()


def blocks(step: Path, kind: str) -> list[memoryview]:
    """Return the first whole blocks of a class's tensors, in the order of their names."""
    found: list[memoryview] = []
    for path in sorted(step.glob(f"{kind}.*.npy")):
        data = memoryview(np.load(path).reshape(-1).view(np.uint8))
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        found += [data[at : at + BLOCK_BYTES] for at in range(0, whole, BLOCK_BYTES)]
    return found[:BLOCKS]


def cases(snapshots: Path) -> dict[tuple[str, str], Case]:
    steps = steps_of(snapshots / RUN)
    kinds = {kind for widths in CASES.values() for kind in widths}
    late, later = ({kind: blocks(steps[number], kind) for kind in kinds} for number in (LATE, LATER))
    return _cases(late, later)


def made_up_cases() -> dict[tuple[str, str], Case]:
    """Return cases of untrained states: normal distributions, and a small step from each."""
    drawn = np.random.default_rng(SEED)
    count = BLOCKS * BLOCK_BYTES // 4
    w32, m, v, step = (drawn.standard_normal(count).astype(np.float32) for _ in range(4))
    w32, m, v = w32 * np.float32(0.02), m * np.float32(1e-4), v * v * np.float32(1e-8)
    late = {"w32": w32, "m": m, "v": v}
    later = {"w32": w32 + step * np.float32(2e-4), "m": m, "v": v * np.float32(0.99) + step * step * np.float32(1e-10)}
    return _cases(_made_up_blocks(late), _made_up_blocks(later))


def _made_up_blocks(state: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[memoryview]]:
    state = {**state, "w16": (state["w32"].view(np.uint32) >> 16).astype(np.uint16)}
    found = {}
    for kind, values in state.items():
        data = memoryview(values.view(np.uint8))
        found[kind] = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return found


def _cases(late: dict[str, list[memoryview]], later: dict[str, list[memoryview]]) -> dict[tuple[str, str], Case]:
    found = {}
    for codec, widths in CASES.items():
        for kind, width in widths.items():
            bases = late[kind] if codec == Codec.DPLANE else [None] * len(later[kind])
            found[codec.name, kind] = Case(Coding(codec, width), later[kind], bases)
    return found


def report(everything: dict[tuple[str, str], Case], rounds: int) -> dict[str, Any]:
    """Return GB/s of raw bytes by codec, class and direction.

    Each row has one thread, the same scaled to a memcpy of 10 GB/s, and two threads over one. The class "all" is the
    bytes of all classes over their time. Ratios are taken within a round. Figures are medians of the quiet rounds,
    or of all rounds if too few are quiet.
    """
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    samples: list[Sample] = []
    threads = Threads()
    try:
        for number in range(WARM_UPS + TRIES * rounds):
            before = threads.gain()
            copy = COPY_BYTES / timed(partial(np.copyto, target, source))
            taken = _round(threads, everything)
            if number >= WARM_UPS:
                samples.append(Sample(min(before, threads.gain()), copy, taken))
            if sum(sample.is_quiet for sample in samples) == rounds:
                break
    finally:
        threads.close()
    quiet = [sample for sample in samples if sample.is_quiet]
    used = quiet if len(quiet) >= QUIET_ROUNDS_MIN else samples
    return {
        "rounds": len(samples),
        "quiet rounds": len(quiet),
        "memcpy": statistics.median(sample.copy for sample in used) / 1e9,
        "Huffman coder, 2 threads over 1": statistics.median(sample.gain for sample in used),
        "ratio": {f"{codec} {kind}": case.ratio for (codec, kind), case in everything.items()},
        "rows": {" ".join(key): _medians(key, used) for key in used[0].taken},
    }


def _medians(key: Key, samples: list[Sample]) -> dict[str, float]:
    taken = [(sample.taken[key], sample.copy) for sample in samples]
    return {
        "GB/s": statistics.median(size / one for (size, one, _), _ in taken) / 1e9,
        "where memcpy makes 10": statistics.median(SCALE * size / one / copy for (size, one, _), copy in taken),
        "2 threads over 1": statistics.median(one / two for (_, one, two), _ in taken),
    }


def _round(threads: Threads, everything: dict[tuple[str, str], Case]) -> Taken:
    taken: Taken = {}
    for way in WAYS:
        for codec, widths in CASES.items():
            of_all = []
            for kind in widths:
                case = everything[codec.name, kind]
                task = getattr(case, way)
                of_all.append((case.size, threads.seconds(task, 1), threads.seconds(task, 2)))
                taken[codec.name, kind, way] = of_all[-1]
            size, one, two = (sum(column) for column in zip(*of_all, strict=True))
            taken[codec.name, "all", way] = (int(size), one, two)
    return taken


# -- processes, which do not share an interpreter lock ------------------------------------------------------------------


def of_processes(everything: dict[tuple[str, str], Case], rounds: int) -> dict[str, dict[str, float]]:
    """Return the speed of two processes over one, and over two threads, for each codec and way, with all classes.

    Measurements alternate, and each figure is a median. The processes inherit the blocks by fork, so the cost to
    send blocks does not count. Call this before the process has threads.
    """
    tasks = list(everything.values())
    numbers = {codec.name: [at for at, key in enumerate(everything) if key[0] == codec.name] for codec in CASES}
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
                    one, both = (sum(_both_seconds(workers[:count], (at, way)) for at in indices) for count in (1, 2))
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


def _both_seconds(workers: list[Connection], job: _Job) -> float:
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
