"""One state of `dcp.py` in one process: saves, loads, and training while a save drains."""

from __future__ import annotations

import gc
import math
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dcp_peers as peers
import dcp_states as states
import fsspec
import torch
import torch.distributed.checkpoint as stock
from device_card import DryCard
from harness import SEED, Rows, proc_number, timed
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader

WARM_UPS = 3
PER_TENSOR_S = 15e-6
IDLE_S = 2.0
PAUSE_S = 1.0
# Other work on the host makes one turn several times as long as another, so short turns are repeated more often.
BLOCKED_TURNS = 2
DRAIN_TURNS = 2
LAUNCHES = 5000
LAUNCHES_IDLE_S = 0.5
FEW, MANY = 8, 1172  # tensors; a decoder of 293 parameters with AdamW has many
DEVICE_BYTES = 64 << 20
WIDTH = 512
BATCH = 64
PARTS = 8


def shuffled(everyone: list[peers.Peer], number: int) -> list[peers.Peer]:
    """Return the order of a round. It changes, because a peer leaves work for the disk and memory to the next peer."""
    return random.Random(SEED + number).sample(everyone, len(everyone))


class Training:
    """A training loop on the CPU: steps of a small model, one after the other."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(
            *(layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def seconds_per_step(self, is_over: Callable[[], bool]) -> tuple[float, float]:
        """Train until `is_over` returns true. Return the seconds per step and in all."""
        begin, steps = time.perf_counter(), 0
        while not is_over() or not steps:
            self.step()
            steps += 1
        took = time.perf_counter() - begin
        return took / steps, took


class Launches(Training):
    """A loop of many short operations. As a launch of a kernel does, each gives up the interpreter's lock and takes it.

    The loop needs the lock all the time. So it loses the time for which threads of the save hold it.
    """

    def __init__(self) -> None:
        self._tensor = torch.zeros(16)

    def step(self) -> None:
        for _ in range(LAUNCHES):
            self._tensor.add_(1)


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether `seconds` have passed since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def when_done(wait: Callable[[], object]) -> Callable[[], bool]:
    """Call ``wait()`` on a thread, and return a function that says whether it has returned."""
    thread = threading.Thread(target=wait)
    thread.start()
    return lambda: not thread.is_alive()


class SlicePlanner(DefaultLoadPlanner):
    """Request one of eight parts of the rows of every tensor, as one of eight ranks does, and no objects.

    Of a tensor with fewer than eight rows it requests one row.

    Attributes:
        needed_bytes: Bytes that it requests.
        ranges: Number of pieces that it requests.
        out: The loaded tensors by name.
    """

    def __init__(self, part: int) -> None:
        super().__init__()
        self._part = part
        self.needed_bytes = 0
        self.ranges = 0
        self.out: dict[str, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn, described in self.metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                continue
            offsets, lengths = box(described.size, self._part)
            self.out[fqn] = torch.zeros(lengths, dtype=described.properties.dtype)
            wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
            items += create_read_items_for_chunk_list(fqn, described, [wanted])
            self.needed_bytes += math.prod(lengths) * described.properties.dtype.itemsize
        self.ranges = len(items)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        target = self.out[read_item.dest_index.fqn]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass


class TimedReader(TierReader):
    """Notes the seconds of a load by phase: the metadata, then planning, then reading with hashing and scatter."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds: dict[str, float] = {}
        self._planned_from = 0.0

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        found = super().read_metadata(*arguments, **options)
        self._planned_from = time.perf_counter()
        self.seconds["metadata"] = self._planned_from - begin
        return found

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        begin = time.perf_counter()
        self.seconds["planning"] = begin - self._planned_from
        found = super().read_data(plan, planner)
        self.seconds["reading"] = time.perf_counter() - begin
        return found


def box(shape: Any, part: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the shape of a tensor's part."""
    if not shape:
        return (), ()
    rows = max(shape[0] // PARTS, 1)
    first = min(part * rows, shape[0] - rows)
    return (first, *(0 for _ in shape[1:])), (rows, *shape[1:])


class Session:
    """One state and all peers that save it.

    Args:
        root: A directory on the disk to measure.
        name: Name of the state.
        size: Bytes of the state; ignored if the state has a fixed size.
        rounds: Rounds that count.
        device: Whether tierfs finds the tensors on a GPU, which is host memory too, and stages them in its device tier.
    """

    def __init__(self, root: Path, name: str, size: int, rounds: int, *, device: bool = False) -> None:
        self._root = root
        self._rounds = rounds
        self._number = 0
        makers = {
            "blocks": partial(states.blocks, size),
            "transformer": partial(states.transformer, size),
            "few": partial(states.small, FEW),
            "many": partial(states.small, MANY),
        }
        self.state = makers.get(name, states.small)()
        options = {}
        if device:
            card = DryCard()
            for tensor in states.tensors_of(self.state):
                card.own(tensor)
            options = {"stage": "device", "device": DEVICE_BYTES}
        tierfs.init(f"file://{root}/store")
        self._ours = peers.Tierfs(f"tierfs::file://{root}/store", states.bytes_in(self.state), **options)
        self._tierfs = peers.Peer("tierfs", self._ours.begin, is_async=True)
        self._kept = peers.stock_async_kept()

    def _begin(self, peer: peers.Peer) -> tuple[Path, float, Callable[[], object]]:
        self._number += 1
        directory = self._root / f"step_{self._number}"
        gc.collect()  # so that no peer pays for the garbage of earlier peers
        begin = time.perf_counter()
        wait = peer.begin(self.state, directory)
        return directory, time.perf_counter() - begin, wait

    def saves(self) -> dict[str, dict[str, float]]:
        """Return the seconds blocked and the seconds until durable, by peer."""
        state, rows = self.state, Rows()
        everyone = [self._tierfs, peers.stock(1), peers.stock(2), peers.stock_async(), self._kept]
        everyone += [peers.limit(self._root, state), peers.torch_save(), peers.safetensors()]
        for number in range(WARM_UPS + self._rounds):
            if number == WARM_UPS:
                rows.clear()
            for peer in shuffled(everyone, number):
                states.renew(state, self._number)
                directory, blocked, wait = self._begin(peer)
                durable = blocked + timed(wait)
                rows.note(peer.name, blocked=blocked if peer.is_async else durable, durable=durable)
                if peer.name == "tierfs":
                    rows.note("tierfs", object=durable + timed(partial(self._ours.writer.wait, "object")))
                shutil.rmtree(directory, ignore_errors=True)
        return rows.medians()

    def blocked(self) -> dict[str, Any]:
        """Return the seconds that a training loop waits for a copy, and for peers that save in the background.

        Each copies into memory that it used in its last turn. A second of training precedes each save, so that the disk
        has finished the writes of the previous peer.
        """
        rows = Rows()
        copy, training = peers.copy(self.state), Training()
        everyone = [copy, self._tierfs, self._kept]
        for number in range(WARM_UPS + BLOCKED_TURNS * self._rounds):
            if number == WARM_UPS:
                rows.clear()
            for peer in shuffled(everyone, number):
                states.renew(self.state, self._number)
                training.seconds_per_step(after(PAUSE_S))
                directory, blocked, wait = self._begin(peer)
                rows.note(peer.name, blocked=blocked)
                wait()
                if peer is self._tierfs:
                    self._ours.writer.wait("object")
                shutil.rmtree(directory, ignore_errors=True)
        count = len(states.tensors_of(self.state))
        return {
            "seconds": {name: row["blocked"] for name, row in rows.medians().items()},
            "of allowed": rows.ratio(
                "blocked", "tierfs", peers.COPY, lambda copied: 1.1 * copied + PER_TENSOR_S * count
            ),
            "of kept": rows.ratio("blocked", "tierfs", peers.KEPT),
        }

    def loads(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the seconds of loads by peer and source, and the bytes that a load of an eighth of the rows reads."""
        state, ours = self.state, self._ours
        self._number += 1
        plain = self._root / f"step_{self._number}"
        ours.begin(state, plain)()
        ours.writer.wait("object")
        url = ours.checkpoint(plain)
        fs, path = fsspec.url_to_fs(url, **ours.options)
        stock.save(state, storage_writer=stock.FileSystemWriter(plain))
        target = states.empty_like(state)
        reader: Callable[[], Any] = partial(TierReader, url, **ours.options)

        def load_ours() -> None:
            stock.load(target, storage_reader=reader(), planner=TierLoadPlanner())

        def load_stock() -> None:
            stock.load(target, storage_reader=stock.FileSystemReader(plain))

        def cold() -> None:
            fs.evict(path, "ram")
            states.drop_page_cache(self._root)

        rows = Rows()
        for number in range(1 + self._rounds):
            if number == 1:
                rows.clear()
            for name, load, prepare in (
                ("tierfs, ram", load_ours, partial(fs.prefetch, path, "ram")),
                ("stock, page cache", load_stock, None),
                ("tierfs, nvme cold", load_ours, cold),
                ("stock, cold", load_stock, cold),
            ):
                if prepare is not None:
                    prepare()
                for tensor in states.tensors_of(target):
                    tensor.zero_()
                rows.note(name, seconds=timed(load))
                assert states.same(target, state)
        slices = {}
        for name, make in (("tierfs", reader), ("stock", partial(stock.FileSystemReader, plain))):
            cold()
            planner = SlicePlanner(3)
            before = proc_number("self", "io", "rchar")
            stock.load({}, storage_reader=make(), planner=planner)
            read = proc_number("self", "io", "rchar") - before
            slices[name] = {"read": read, "needed": planner.needed_bytes, "ranges": planner.ranges}
        shutil.rmtree(plain)
        return {name: row["seconds"] for name, row in rows.medians().items()}, slices

    def load_phases(self) -> dict[str, float]:
        """Return the seconds of a load from the ram tier by phase: see `TimedReader`."""
        self._number += 1
        directory = self._root / f"step_{self._number}"
        self._ours.begin(self.state, directory)()
        self._ours.writer.wait("object")
        target, rows = states.empty_like(self.state), Rows()
        for number in range(1 + self._rounds):
            if number == 1:
                rows.clear()
            reader = TimedReader(self._ours.checkpoint(directory), **self._ours.options)
            whole = timed(partial(stock.load, target, storage_reader=reader, planner=TierLoadPlanner()))
            rows.note("tierfs", whole=whole, **reader.seconds)
        return rows.medians()["tierfs"]

    def training(self, training: Training, idle_s: float = IDLE_S) -> dict[str, Any]:
        """Return the cost of a drain to a training loop, by peer. ``idle_s`` is how long it trains before each save."""
        rows = Rows()
        stock_async = peers.stock_async()
        training.seconds_per_step(after(idle_s))
        everyone = [self._tierfs, stock_async, self._kept]
        for number in range(1 + DRAIN_TURNS * self._rounds):
            if number == 1:
                rows.clear()
            for peer in shuffled(everyone, number):
                idle, _ = training.seconds_per_step(after(idle_s))
                states.renew(self.state, self._number)
                directory, blocked, wait = self._begin(peer)
                step, drain = training.seconds_per_step(when_done(wait))
                lost = drain * (1 - idle / step)
                if peer.name == "tierfs":
                    step_object, upload = training.seconds_per_step(
                        when_done(partial(self._ours.writer.wait, "object"))
                    )
                    rows.note("tierfs", lost_object=lost + upload * (1 - idle / step_object))
                rows.note(peer.name, slowdown=step / idle - 1, drain=drain, lost=lost, blocked=blocked)
                shutil.rmtree(directory, ignore_errors=True)
        of_stock = {key: rows.ratio(key, "tierfs", stock_async.name) for key in ("slowdown", "lost")}
        return {"rows": rows.medians(), "of stock": of_stock, "lost of kept": rows.ratio("lost", "tierfs", peers.KEPT)}
