"""One part of `dcp.py` in a process of its own: saves, loads, training beside saves, memory, or four ranks' replicas.

::

    python dcp_worker.py state DIRECTORY BYTES NAME ROUNDS TRAINING
    python dcp_worker.py launches DIRECTORY BYTES NAME ROUNDS DEVICE
    python dcp_worker.py first DIRECTORY BYTES
    python dcp_worker.py life DIRECTORY BYTES NAME NUMBER
    python dcp_worker.py footprint DIRECTORY BYTES PEER TENSORS
    python dcp_worker.py replicas DIRECTORY BYTES RANK RANKS

It prints one JSON document; a life then waits to be killed. The environment names the state directory and the folder of shared memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import dcp_peers as peers
import dcp_states as states
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_session import LAUNCHES_IDLE_S, Launches, Session, Training, after
from harness import SEED, peaks, proc_number, timed

import tierfs
from tierfs.dcp import TierWriter

SAVES = 9
LIFE_SAVES = 5
TRAINED_S, BETWEEN_S, ALONE_S = 2.0, 1.5, 1.0  # before the first save; between two; before the writer is made


def state_of(directory: Path, size: int, name: str, rounds: int, *, training: bool) -> dict[str, Any]:
    session = Session(directory, name, size, rounds)
    state = session.state
    found: dict[str, Any] = {"bytes_of": states.bytes_in(state), "tensors_of": len(states.tensors_of(state))}
    with peers.one_rank(directory):
        found["saves"] = session.saves()
        found["blocked"] = session.blocked()
        found["phases"] = session.load_phases()
        if name != "small":
            found["loads"], found["slices"] = session.loads()
        if training:
            found["training"] = session.training(Training())
    return found


def launches(directory: Path, size: int, name: str, rounds: int, *, device: bool) -> dict[str, Any]:
    """Return the cost of a drain to a loop of short operations on one processor: see `Session.training`."""
    torch.set_num_threads(1)
    session = Session(directory, name, size, rounds, device=device)
    with peers.one_rank(directory):
        return session.training(Launches(), LAUNCHES_IDLE_S)


def first(directory: Path, size: int) -> dict[str, float]:
    """Return the seconds that a first save blocks on a host without state, and the seconds to clone each tensor."""
    state = states.transformer(size)
    states.back(2 * size)
    begin = time.perf_counter()
    copies = [tensor.clone() for tensor in states.tensors_of(state)]
    fresh = time.perf_counter() - begin
    del copies
    tierfs.init(f"file://{directory}/store")
    ours = peers.Tierfs(f"tierfs::file://{directory}/store", states.bytes_in(state))
    with peers.one_rank(directory):
        states.back(2 * size)
        begin = time.perf_counter()
        wait = ours.begin(state, Path("step"))
        blocked = time.perf_counter() - begin
        wait()
        durable = time.perf_counter() - begin
        stock = peers.stock_async()
        begin = time.perf_counter()
        wait = stock.begin(state, directory / "stock")
        stock_blocked = time.perf_counter() - begin
        wait()
    ours.writer.wait("object")
    return {
        "fresh": fresh,
        "blocked": blocked,
        "durable": durable,
        "stock_blocked": stock_blocked,
    }


def life(directory: Path, size: int, name: str, number: int) -> dict[str, Any]:
    """Return what the saves of one process cost its training; those of life 0 on a host without state.

    The process trains, makes its writer and says what it will save, trains for two seconds, and saves five times. Later
    lives first load what the one before saved last.
    """
    state = {"blocks": states.blocks, "transformer": states.transformer}[name](size)
    url, size = f"tierfs::file://{directory}/store", states.bytes_in(state)
    tierfs.init(f"file://{directory}/store")
    torch.set_num_threads(int(os.environ.get("LIFE_THREADS", "1")))
    training, rows = Training(), []
    with peers.one_rank(directory / f"life_{number}"):
        if number:
            dcp.load(state, storage_reader=tierfs.dcp.TierReader(f"{url}/step_{number * LIFE_SAVES - 1}"))
        copy = peers.copy(state)
        states.back(2 * size + peers.SPARE_BYTES)
        alone, _ = training.seconds_per_step(after(ALONE_S))
        ours = peers.Tierfs(url, size)
        if hasattr(ours.writer, "prepare"):
            ours.writer.prepare(state)
        beside, _ = training.seconds_per_step(after(TRAINED_S))
        for step in range(number * LIFE_SAVES, (number + 1) * LIFE_SAVES):
            states.renew(state, step)
            copied = timed(partial(copy.begin, state, Path("copy")))
            begin = time.perf_counter()
            wait = ours.begin(state, Path(f"step_{step}"))
            rows.append((time.perf_counter() - begin, copied))
            training.seconds_per_step(after(BETWEEN_S))
            wait()
            if len(rows) == 2:
                shared = sum(
                    file.stat().st_blocks * 512 for file in Path(os.environ["TIERFS_SHM_DIR"]).rglob("*.slab*")
                )
        ours.writer.wait("object")
    return {"blocked": rows, "shared": shared / size, "slower": beside / alone - 1}


def footprint(directory: Path, size: int, name: str, count: int) -> dict[str, int]:
    """Return the peaks of descriptors and memory during saves, less the process's values before the first save.

    Descriptors are the median of the saves. They exclude segments, whose number depends on the ram tier's budget.
    """
    state = states.blocks(size, count)
    tierfs.init(f"file://{directory}/store")
    ours = peers.Tierfs(f"tierfs::file://{directory}/store", size)
    peer = {
        "tierfs": peers.Peer("tierfs", ours.begin, is_async=True),
        "stock": peers.stock_async_kept(),
    }[name]
    probes = {
        "descriptors": lambda: len(states.descriptors(segments=False)),
        "segments": lambda: len(states.descriptors(segments=True)),
        "memory": lambda: proc_number("self", "status", "RssAnon"),
    }
    with peers.one_rank(directory):
        before = {probe: read() for probe, read in probes.items()}
        flusher = 0
        saves = []
        for number in range(SAVES):
            with peaks(**probes) as highest:
                wait = peer.begin(state, directory / f"step_{number}")
                wait()
                if name == "tierfs":
                    ours.writer.wait("object")
            saves.append(highest)
            states.renew(state, number)
            if name == "tierfs":
                pid = ours.writer.status()["flusher"].get("pid")
                flusher = max(flusher, proc_number(pid, "status", "RssAnon") if pid else 0)
    found = {probe: max(save[probe] for save in saves) - before[probe] for probe in probes}
    found["descriptors"] = int(statistics.median(save["descriptors"] for save in saves)) - before["descriptors"]
    if name == "tierfs":
        found["flusher"] = flusher
        found["slabs"] = ours.writer.status()["tiers"]["ram"]["store_bytes"]
    return found


class Watched(TierWriter):
    """Note the bytes that all ranks have staged, save by save."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.staged: list[int] = []

    def stage(self, state_dict: dict[str, Any]) -> Any:
        dist.barrier()
        before = filling(self)
        dist.barrier()
        found = super().stage(state_dict)
        dist.barrier()
        self.staged.append(filling(self) - before)
        dist.barrier()
        return found


def filling(writer: TierWriter) -> int:
    """Return the bytes in the ram tier that are not sealed yet."""
    ram = writer.status()["tiers"]["ram"]
    return ram["used_bytes"] - ram["dirty_bytes"] - ram["clean_bytes"]


def replicas(directory: Path, size: int, rank: int, ranks: int) -> dict[str, Any]:
    """Return the bytes that ranks with the same tensors stage in all over the bytes of the state, save by save."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    torch.manual_seed(SEED)
    state = states.transformer(size)
    url = f"tierfs::file://{directory}/store"
    total = states.bytes_in(state)
    options = {"ram": 3 * ranks * total + ranks * peers.SPARE_BYTES, "nvme": 4 * total}
    writer = Watched(url, ack="staged", **options)
    for number in range(SAVES):
        states.renew(state, number)
        dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{url}/step_{number}").result()
        writer.wait("object")
        dist.barrier()
    if rank == 0:
        # The checkpoint must contain all tensors, including those that this rank did not stage.
        loaded = states.empty_like(state)
        dcp.load(loaded, storage_reader=tierfs.dcp.TierReader(f"{url}/step_{SAVES - 1}", **options), no_dist=True)
        assert states.same(loaded, state)
    dist.barrier()
    dist.destroy_process_group()
    return {"staged": [staged / total for staged in writer.staged]}


def main() -> None:
    warnings.simplefilter("ignore")
    what, directory, size, *rest = sys.argv[1:]
    torch.manual_seed(SEED)
    if what == "state":
        found: Any = state_of(Path(directory), int(size), rest[0], int(rest[1]), training=rest[2] == "1")
    elif what == "launches":
        found = launches(Path(directory), int(size), rest[0], int(rest[1]), device=rest[2] == "1")
    elif what == "first":
        found = first(Path(directory), int(size))
    elif what == "life":
        found = life(Path(directory), int(size), rest[0], int(rest[1]))
    elif what == "footprint":
        found = footprint(Path(directory), int(size), rest[0], int(rest[1]))
    else:
        found = replicas(Path(directory), int(size), int(rest[0]), int(rest[1]))
    print(json.dumps(found), flush=True)
    if what == "life":
        sys.stdin.read()


if __name__ == "__main__":
    main()
