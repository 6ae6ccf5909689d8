"""One state of `dcp.py` in one process: saves, loads, and training while a save drains."""

from __future__ import annotations

import gc
import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dcp_peers as peers
import dcp_states as states
import fsspec
import torch.distributed.checkpoint as stock
from dcp_limit import limit
from dcp_slices import SlicePlanner
from dcp_training import Training, after, when_done

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader

WARM_UPS = 3
PER_TENSOR_S = 15e-6
IDLE_S = 2.0
PAUSE_S = 1.0
# Other work on the host makes one turn several times as long as another, so short turns are repeated more often.
BLOCKED_TURNS = 2
DRAIN_TURNS = 2


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def shuffled(everyone: list[peers.Peer], number: int) -> list[peers.Peer]:
    """Return the order of a round. It changes, because a peer leaves work for the disk and memory to the next peer."""
    return random.Random(states.SEED + number).sample(everyone, len(everyone))


class Rows:
    """Figures by name, round by round."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def note(self, name: str, **values: float) -> None:
        for key, value in values.items():
            self._values.setdefault(name, {}).setdefault(key, []).append(value)

    def clear(self) -> None:
        self._values.clear()

    def ratio(self, key: str, one: str, other: str, make: Callable[[float], float] = float) -> float:
        """Return the median, over rounds, of `one` divided by ``make(other)``. A slow phase of the host is in both."""
        pairs = zip(self._values[one][key], self._values[other][key], strict=True)
        return statistics.median(value / make(beside) for value, beside in pairs)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            name: {key: statistics.median(values) for key, values in row.items()} for name, row in self._values.items()
        }


class Session:
    """One state and all peers that save it.

    Args:
        root: A directory on the disk to measure.
        name: Name of the state.
        size: Bytes of the state; ignored if the state has a fixed size.
        rounds: Rounds that count.
    """

    def __init__(self, root: Path, name: str, size: int, rounds: int) -> None:
        self._root = root
        self._rounds = rounds
        self._number = 0
        makers = {"blocks": partial(states.blocks, size), "transformer": partial(states.transformer, size)}
        self.state = makers.get(name, states.small)()
        tierfs.init(f"file://{root}/store")
        self._ours = peers.Tierfs(f"tierfs::file://{root}/store", states.bytes_in(self.state))
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
        others = [peers.torch_save(), peers.safetensors(), peers.torchsnapshot()]
        everyone += [limit(self._root, state), *(peer for peer in others if peer is not None)]
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
            before = states.proc_number("self", "io", "rchar")
            stock.load({}, storage_reader=make(), planner=planner)
            read = states.proc_number("self", "io", "rchar") - before
            slices[name] = {"read": read, "needed": planner.needed_bytes, "ranges": planner.ranges}
        shutil.rmtree(plain)
        return {name: row["seconds"] for name, row in rows.medians().items()}, slices

    def training(self) -> dict[str, Any]:
        """Return the cost of a drain to a training loop, by peer."""
        rows = Rows()
        training, stock_async = Training(), peers.stock_async()
        training.seconds_per_step(after(IDLE_S))
        everyone = [self._tierfs, stock_async, self._kept]
        for number in range(1 + DRAIN_TURNS * self._rounds):
            if number == 1:
                rows.clear()
            for peer in shuffled(everyone, number):
                idle, _ = training.seconds_per_step(after(IDLE_S))
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
        return {"rows": rows.medians(), "of stock": of_stock}
