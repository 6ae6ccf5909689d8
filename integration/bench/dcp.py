"""`tierfs.dcp` and its peers: blocked training, time until durable, the cost of a drain to training, and loads.

    python integration/bench/dcp.py [--bytes 2GiB] [--rounds 5] [--directory DIR] [--json]

All peers save the same states to the same disk, and flush. The states are 64 equal matrices, a decoder of about 300
parameters with AdamW's state (1,200 tensors, most of them small), and 900 tensors of 4 KiB for the cost of a tensor.
Their content is new for each save, so nothing is deduplicated. The limit is a copy of each tensor, then direct
writes of the copy. tierfs has both local tiers in front of a store that is a directory on the same disk. Its flusher
is a process of its own, and its work after `local` ends before the next peer's turn.

The peers take turns in each round, in a new order each time. Figures are medians of the rounds after three that warm
up slabs, disk blocks and the memory of the kept stager, as in a long-running job. The first save of a
process, and the clone it is compared to, have processes of their own that touch free memory first. The time that
training is blocked is measured again in a training loop, against a copy and against peers that save in the
background into warm memory. There, ratios are medians of the ratios within a round. *launches* counts the time that
a loop of short operations loses, because threads of a save hold the interpreter's lock: see `dcp_session.Launches`.
*cold* has the first saves of processes that trained for two seconds, in a loop that leaves one processor idle as beside
a GPU (``LIFE_THREADS=2`` uses both), for new processes and for such that resume after SIGKILL, with half of --bytes.

Before a cold load, ram copies are evicted and the page cache of all files is dropped (posix_fadvise DONTNEED). Bytes
read are ``rchar`` of /proc/self/io. All peers run with the ``GLIBC_TUNABLES`` that docs/how-to/dcp.md advises, unless
the variable is set, even to nothing. Needs about 10 times --bytes of memory, and (rounds + 7) times of disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dcp_peers import KEPT
from harness import SEED, Aims, machine, parser, say

import tierfs
from tierfs.units import parse_size

BLOCK = 1 << 20
RANKS = 4
FOOTPRINT_TENSORS = (16, 256, 4096)
LIVES, LIVES_QUIET = 7, 3
HERE = Path(__file__).parent
SPARE = 256 << 20
TUNABLES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1048576"}


class Bench:
    """One run. Each part is a process of its own, with its own state directory and slabs.

    Args:
        root: A directory on the disk to measure.
        rounds: Rounds that count.
    """

    def __init__(self, root: Path, rounds: int) -> None:
        self._root = root
        self._rounds = rounds

    def state(self, name: str, size: int, *, training: bool) -> dict[str, Any]:
        """Measure saves, loads and training of one state."""
        (found,) = self._workers(["state"], size, name, self._rounds, int(training))
        return found

    def launches(self, size: int) -> dict[str, Any]:
        """Measure what a save takes from a loop of short operations, for states that differ in their tensors' number."""
        return {
            f"{name}{', device tier' * device}": self._workers(["launches"], size, name, self._rounds, device)[0]
            for device in (0, 1)
            for name in ("few", "many")
        }

    def first(self, size: int) -> dict[str, float]:
        """Measure first saves, each of a new process on a host without state."""
        found = [self._workers(["first"], size)[0] for _ in range(self._rounds)]
        return {name: statistics.median(one[name] for one in found) for name in found[0]}

    def cold(self, size: int) -> dict[str, dict[str, float]]:
        """Measure the first saves of new processes, and of those that resume after SIGKILL.

        Returns the medians of the three lives of seven whose copies were the fastest.
        """
        found = {}
        for state in ("blocks", "transformer"):
            lives = [self._lives(size, state) for _ in range(LIVES)]
            for kind, name in enumerate(("new", "resumed")):
                rows = [_of_steady(life[kind]) for life in lives]
                quiet = sorted(rows, key=lambda row: row["copy"])[:LIVES_QUIET]
                found[f"{state}, {name}"] = {key: statistics.median(row[key] for row in quiet) for key in rows[0]}
        return found

    def _lives(self, size: int, state: str) -> list[dict[str, Any]]:
        """Run a process that saves until it is killed, and another one that resumes."""
        found = []
        with self._place() as (root, environment):
            for number in range(2):
                command = [sys.executable, HERE / "dcp_worker.py", "life", root, size, state, number]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                with subprocess.Popen(list(map(str, command)), env=environment, **pipes) as process:
                    found.append(json.loads(process.stdout.readline()))
                    process.kill()
        return found

    def footprint(self, size: int) -> dict[str, dict[int, dict[str, int]]]:
        return {
            name: {count: self._workers(["footprint"], size, name, count)[0] for count in FOOTPRINT_TENSORS}
            for name in ("tierfs", "stock")
        }

    def replicas(self, size: int) -> list[float]:
        """Return the bytes that four ranks stage over those of the state, save by save."""
        return self._workers(["replicas"] * RANKS, size, ranks=RANKS)[0]["staged"]

    def _workers(self, whats: list[str], size: int, *more: object, ranks: int = 0) -> list[Any]:
        with self._place() as (root, environment):
            if ranks:
                tierfs.init(f"file://{root}/store")
                environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            processes = []
            for rank, what in enumerate(whats):
                arguments = [*more, *((rank, ranks) if ranks else ())]
                command = [sys.executable, HERE / "dcp_worker.py", what, root, size, *arguments]
                processes.append(subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE))
            outputs = [process.communicate()[0] for process in processes]
            if any(process.returncode for process in processes):
                raise SystemExit(f"{whats[0]} failed: {[process.returncode for process in processes]}")
            return [json.loads(output) for output in outputs]

    @contextlib.contextmanager
    def _place(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield a directory on the disk, and the environment of processes that have their state and slabs there."""
        root = Path(tempfile.mkdtemp(dir=self._root))
        shared = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir="/dev/shm"))
        environment = TUNABLES | os.environ | {"TIERFS_STATE_DIR": str(root / "state"), "TIERFS_SHM_DIR": str(shared)}
        try:
            yield root, environment
        finally:
            subprocess.run(
                [sys.executable, "-m", "tierfs.cli", "flusher", "stop", f"file://{root}/store"],
                env=environment,
                check=False,
                capture_output=True,
            )
            shutil.rmtree(root)
            shutil.rmtree(shared)


def _of_steady(life: dict[str, Any]) -> dict[str, float]:
    """Return what the first two saves of a life blocked, as multiples of the later ones, and its other figures."""
    blocked, copies = zip(*life["blocked"], strict=True)
    steady = statistics.median(blocked[2:])
    others = {"steady": steady, "copy": statistics.median(copies), "shared": life["shared"], "slower": life["slower"]}
    return {"first": blocked[0] / steady, "second": blocked[1] / steady, **others}


def aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    found = Aims()
    at_most, at_least = found.at_most, found.at_least
    for state, saves in report["saves"].items():
        blocked = report["blocked"][state]
        at_most(f"{state}: blocked, of 1.1 x copy_ into warm memory + 15 us a tensor", blocked["of allowed"], 1.0)
        at_most(f"{state}: blocked, of stock with a kept stager", blocked["of kept"], 0.4 if state == "small" else 1.0)
        if state != "small":
            for name in ("stock save, 2 threads", KEPT):
                at_least(
                    f"{state}: durable, times as fast as {name}",
                    saves[name]["durable"] / saves["tierfs"]["durable"],
                    1.5,
                )
    if "first" in report:
        first = report["first"]
        at_most("first save: blocked, of a clone of each tensor", first["blocked"] / first["fresh"], 0.6)
    for process, row in report.get("cold", {}).items():
        for save in ("first", "second"):
            at_most(f"{process}: the {save} save blocks, of a steady one", row[save], 1.5)
        at_most(f"{process}: shared memory after two saves, of the state", row["shared"], 2.1)
        at_most(f"{process}: training, slower while memory is made ahead", row["slower"], 0.02)
    for state, loads in report["loads"].items():
        at_least(
            f"{state}: load from ram, times as fast as stock warm",
            loads["stock, page cache"] / loads["tierfs, ram"],
            1.3,
        )
        at_least(
            f"{state}: load from nvme, times as fast as stock cold",
            loads["stock, cold"] / loads["tierfs, nvme cold"],
            1.0,
        )
    for state, slices in report["slices"].items():
        row = slices["tierfs"]
        at_most(
            f"{state}: bytes read for an eighth, of 1.1 x the needed + 1 MiB a range",
            row["read"] / (1.1 * row["needed"] + BLOCK * row["ranges"]),
            1.0,
        )
    for training in report["training"].values():
        of_stock = training["of stock"]
        at_most("slowdown of training until durable, of stock async_save's", of_stock["slowdown"], 0.5)
        at_most("seconds of training lost until durable, of stock async_save's", of_stock["lost"], 0.5)
    for state, training in report.get("launches", {}).items():
        limit = 0.5 if state.startswith("many") else 1.0
        at_most(
            f"{state}: seconds of short operations lost, of stock with a kept stager", training["lost of kept"], limit
        )
    if "footprint" in report:
        ours = report["footprint"]["tierfs"]
        counts = [row["descriptors"] for row in ours.values()]
        at_most("descriptors of a save: more with 4096 tensors than with 16", counts[-1] - counts[0], 2)
        at_most(
            "memory of a save beyond the slabs, of 256 MiB",
            max(row["memory"] + row["flusher"] for row in ours.values()) / SPARE,
            1,
        )
    if "replicas" in report:
        at_most(
            "replicas on 4 ranks: bytes staged from the second save on, of the state", max(report["replicas"][1:]), 1.05
        )
    return found.found


PARTS = ("blocks", "transformer", "small", "training", "launches", "first", "cold", "footprint", "replicas")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--bytes", default="2GiB", help="bytes of a state")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    options = arguments.parse_args()
    size = parse_size(options.bytes)
    root = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=options.directory))
    report: dict[str, Any] = {
        "bytes": size,
        "rounds": options.rounds,
        "seed": SEED,
        "machine": machine(
            torch=torch.__version__, **{name: os.environ.get(name, advised) for name, advised in TUNABLES.items()}
        ),
        **{key: {} for key in ("bytes_of", "tensors_of", "saves", "blocked", "phases", "loads", "slices", "training")},
    }
    bench = Bench(root, options.rounds)
    try:
        for name in ("blocks", "transformer", "small"):
            if name in options.only:
                found = bench.state(name, size, training=name == "blocks" and "training" in options.only)
                for key, value in found.items():
                    report[key][name] = value
        for name, measure in (
            ("launches", partial(bench.launches, size)),
            ("first", partial(bench.first, size)),
            ("cold", partial(bench.cold, size // 2)),
            ("footprint", partial(bench.footprint, size // 4)),
            ("replicas", partial(bench.replicas, size // 16)),
        ):
            if name in options.only:
                report[name] = measure()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report["aims"] = aims(report)
    say(report, as_json=options.json)


if __name__ == "__main__":
    main()
