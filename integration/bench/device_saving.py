"""The two sides of `device.py` behind one interface: tierfs in one of its modes, and stock DCP at its best."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as dcp
from device_card import Card
from device_training import Trainer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import tierfs
from tierfs.dcp import TierWriter

STOCK_THREADS = 2
REAPED_BYTES_MIN = 1 << 20


@dataclass
class Pending:
    """A save in progress.

    Attributes:
        call_s: Wall seconds of the call.
        stamps: Points of the current stream before and after the call.
        before_optimizer: Training must call it before parameters change; ``None`` for nothing.
        wait: Returns when the save is done.
        stage_s: Wall seconds of ``stage`` alone.
        queued_s: Wall seconds from the call to the end of the launch that captures tensors; ``None`` if unknown.
    """

    call_s: float
    stamps: tuple[Any, Any]
    before_optimizer: Callable[[], object] | None
    wait: Callable[[], object]
    stage_s: float = 0.0
    queued_s: float | None = None
    staged: list[float] = field(default_factory=list)


class Store:
    """A store in its own directory, with a ram tier in front. `settle` deletes the chunks in the directory.

    Args:
        root: Parent of the store and of the state directory.
        ram: Bytes of the ram tier.
    """

    def __init__(self, root: Path, ram: int) -> None:
        self.root = root
        os.environ["TIERFS_STATE_DIR"] = str(root / "state")
        tierfs.init(f"file://{root}/store")
        self.url = f"tierfs::file://{root}/store"
        self.options = {"ram": ram, "nvme": "0"}

    def writer(self, stage: str, device: int | None = None) -> TierWriter:
        return TierWriter(self.url, ack="staged", stage=stage, device=device, **self.options)

    def settle(self, writer: TierWriter) -> float:
        """Wait until everything is in the store's directory, then delete the chunks there. The ram tier still has them.

        A disk has no room for all saves of a run. Returns the seconds of the wait.
        """
        begin = time.perf_counter()
        writer.wait("object")
        took = time.perf_counter() - begin
        self.reap()
        return took

    def reap(self) -> None:
        for path in (self.root / "store").rglob("*"):
            if path.is_file() and path.stat().st_size >= REAPED_BYTES_MIN:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the flusher and delete the store."""
        gc.collect()
        command = [sys.executable, "-m", "tierfs.cli", "flusher", "stop", f"file://{self.root}/store"]
        try:
            subprocess.run(command, check=False, capture_output=True, timeout=20)
        except subprocess.TimeoutExpired:
            print("the flusher does not stop", flush=True)
        shutil.rmtree(self.root, ignore_errors=True)


class Probe:
    """A stager that notes how long a writer's own ``stage`` takes."""

    def __init__(self, writer: TierWriter) -> None:
        self._writer = writer
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def stage(self, state: dict[str, Any]) -> Any:
        begin = time.perf_counter()
        try:
            return self._writer.stage(state)
        finally:
            self.seconds = time.perf_counter() - begin


class Ours:
    """tierfs with one writer."""

    def __init__(self, card: Card, store: Store, stage: str, device: int | None = None) -> None:
        self._card, self.store = card, store
        self.writer = store.writer(stage, device)
        self._number = 0
        self._name = stage

    def url(self) -> str:
        return f"{self.store.url}/{self._name}_{self._number}"

    def begin(self, state: dict[str, Any]) -> Pending:
        self._number += 1
        probe = Probe(self.writer)
        queued: list[float] = []
        accelerator = self._card.accelerator
        gather = accelerator.gather

        def noted(*arguments: Any) -> None:
            gather(*arguments)
            queued.append(time.perf_counter())

        with mock.patch.object(accelerator, "gather", noted):
            begin, before = time.perf_counter(), self._card.stamp()
            future = dcp.async_save(state, checkpoint_id=self.url(), storage_writer=self.writer, async_stager=probe)
            call_s, after = time.perf_counter() - begin, self._card.stamp()
        queued_s = queued[0] - begin if queued else None
        return Pending(call_s, (before, after), None, future.result, probe.seconds, queued_s)

    def settle(self) -> float:
        return self.store.settle(self.writer)

    def report(self) -> dict[str, Any]:
        """Return the device tier's status, with the seconds of all drains as ``moved_s``."""
        found = dict(self.writer.status()["tiers"].get("device") or {})
        rate = found.get("drain_bytes_per_s")
        found["moved_s"] = found["drained_bytes"] / rate if rate else 0.0
        return found

    def close(self) -> None:
        self.writer.close()
        del self.writer
        gc.collect()
        self._card.release()


class KeptStager(DefaultStager):
    """torch's stager, which stays usable for the next save after torch closes it.

    The stager of torch 2.11 drops its memory after each save and fails in the second. Later versions keep it, like this
    class.
    """

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._state_dict_stager.close = self.close

    def close(self) -> None:
        pass

    def end(self) -> None:
        del self._state_dict_stager.close
        super().close()


class Stock:
    """torch's asynchronous save, with pinned and shared memory that all saves reuse."""

    def __init__(self, card: Card, root: Path) -> None:
        self._card, self._root, self._number = card, root, 0
        options = StagingOptions() if card.is_real else StagingOptions(False, False, False, False)
        self._stager = KeptStager(options)
        root.mkdir(parents=True, exist_ok=True)

    def begin(self, state: dict[str, Any]) -> Pending:
        self._number += 1
        writer = dcp.FileSystemWriter(self._root / f"step_{self._number}", thread_count=STOCK_THREADS)
        staged: list[float] = []
        begin, before = time.perf_counter(), self._card.stamp()
        found = dcp.async_save(state, storage_writer=writer, async_stager=self._stager)
        call_s, after = time.perf_counter() - begin, self._card.stamp()
        if not hasattr(found, "staging_completion"):
            return Pending(call_s, (before, after), None, found.result)
        found.staging_completion.add_done_callback(lambda _: staged.append(time.perf_counter() - begin))
        pending = Pending(
            call_s, (before, after), found.staging_completion.result, found.upload_completion.result, call_s
        )
        pending.staged = staged
        return pending

    def settle(self) -> float:
        for path in self._root.glob("step_*"):
            shutil.rmtree(path)
        return 0.0

    def close(self) -> None:
        self._stager.end()
        self.settle()
        gc.collect()


def when(begin: float, wait: Callable[[], object]) -> Callable[[], float]:
    """Call `wait` on a thread. Return a function that joins it and returns the seconds from ``begin``, or raises."""
    found: list[Any] = []

    def look() -> None:
        try:
            wait()
            found.append(time.perf_counter() - begin)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def join() -> float:
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return float(found[0])

    return join


def cycle(trainer: Trainer, peer: Ours | Stock, steps: int, base_s: list[float]) -> dict[str, Any]:
    """Run a step, a save behind it, and more steps, like a training loop. Nothing waits for the GPU before the save.

    Args:
        trainer: The training.
        peer: Saves the state.
        steps: Steps after the save.
        base_s: Wall seconds of earlier windows of ``steps + 1`` undisturbed steps. One more window, taken after the
            save, is added.
    """
    state, card = trainer.state(), trainer.card
    gc.collect()
    trainer.steps = 0
    marks = []
    card.synchronize()
    begin = time.perf_counter()
    trainer.step()
    pending = peer.begin(state)
    saved = when(begin, pending.wait)
    for number in range(steps):
        trainer.step(pending.before_optimizer if number == 0 else None)
        marks.append(card.stamp())
    card.synchronize()
    took = time.perf_counter() - begin
    saved_s = saved()
    settle_s = peer.settle()
    before, after = base_s[-1], trainer.window(steps + 1)
    base_s.append(after)
    return {
        "lost_s": took - (before + after) / 2,
        "took_s": took,
        "base_s": (before + after) / 2,
        "blocked_stream_s": card.between(*pending.stamps),
        "call_s": pending.call_s,
        "stage_s": pending.stage_s,
        "queued_s": pending.queued_s,
        "staged_s": pending.staged[0] if pending.staged else None,
        "saved_s": saved_s,
        "settle_s": settle_s,
        "step_s": [card.between(one, other) for one, other in zip([pending.stamps[1], *marks], marks, strict=False)],
    }


def medians(cycles: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, and all cycles."""
    found: dict[str, Any] = {}
    for key in cycles[0]:
        values = [one[key] for one in cycles if isinstance(one[key], (int, float))]
        if values:
            found[key] = statistics.median(values)
    return {**found, "cycles": cycles}
