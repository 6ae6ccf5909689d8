"""One save at a time, on a thread of its own: what the ranks agree on before it, and what becomes of it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from tierfs.checkpoint.prune import RECORD
from tierfs.dcp import TierWriter
from tierfs.dcp.address import inside
from tierfs.dcp.save.publish import level_reached, wait_for
from tierfs.errors import AlreadyExistsError, TierfsError
from tierfs.format.checkpoint import SaveMark
from tierfs.host.pending.levels import Level
from tierfs.store import level_of
from tierfs.threads import start_daemon
from tierfs.train.agree import World
from tierfs.train.digests import digests_of, first_difference
from tierfs.train.run import ABOUT, RunDirectory

__all__ = ["Order", "RunWriter", "SaveHandle", "SaveThread", "reason_of"]

_logger = logging.getLogger("tierfs.train")


class RunWriter(TierWriter):
    """A writer that notes what is known of the state right before the checkpoint is published, so none is without its notes.

    Attributes:
        notes: Called on the coordinator with the save's id.
    """

    notes: Callable[[str], None] | None = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `TierWriter.finish`."""
        assert self._save.mark is not None, "prepare_global_plan comes first"
        if self.notes is not None:
            self.notes(self._save.mark.save_id)
        super().finish(metadata, results)


@dataclass(slots=True)
class Order:
    """A save that was asked for, on one rank.

    Attributes:
        step: Of the training.
        kind: ``full`` or ``light``.
        staged: The state, safe from training.
        problem: What kept it from being staged.
        metrics: By name.
        overwrite: Whether another content of this step may be replaced.
    """

    step: int
    kind: str
    staged: Mapping[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False


class SaveHandle:
    """A save that is under way, or done.

    Attributes:
        step: Of the training.
        kind: ``full``, or ``light`` for one without optimizer and data loader.
        blocked_s: How long it kept this rank's training from going on.
        was_there: Whether the step was saved already, with the same content, so that nothing had to be done.
    """

    def __init__(self, run: RunDirectory, order: Order) -> None:
        self.step = order.step
        self.kind = order.kind
        self.blocked_s = 0.0
        self.was_there = False
        self._run = run
        self._order: Order | None = order
        self._mark: SaveMark | None = None
        self._cancelled = False
        self._ended: Future[None] = Future()
        self._asked_s = time.monotonic()
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, kind={self.kind!r}, done={self.done})"

    @property
    def url(self) -> str:
        """Where the checkpoint is."""
        return self._run.url_of(self.step)

    @property
    def done(self) -> bool:
        """Whether it came to its end: it failed, or has reached the level that the manager asks for."""
        return self._ended.done()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; ``None`` while it is under way, and where it did not."""
        return self._ended.exception() if self._ended.done() else None

    @property
    def seconds(self) -> float:
        """How long it took from being asked for to its end; 0 while it is under way."""
        return self._seconds

    def wait(self, level: str = "staged", timeout: float | None = None) -> None:
        """Wait until the checkpoint has reached a level: below ``"object"`` what this host saved, there the whole.

        Raises:
            TimeoutError: It has not, in time.
            TierfsError, CheckpointException: The save failed.
        """
        begun = time.monotonic()
        try:
            self._ended.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"{self.url}: the save has not come to its end within {timeout} s") from None
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        store, path = self._run.path_of(self.step)
        wait_for(store, path, inside(path, ".metadata"), self._mark, Level.parse(level), left)

    @property
    def level(self) -> str:
        """The level that it has reached, as this host sees it; ``none`` while it is under way, and where it failed."""
        if not self._ended.done() or self._ended.exception() is not None:
            return Level.NONE.label
        store, path = self._run.path_of(self.step)
        return level_reached(store, path, inside(path, ".metadata"), self._mark).label

    @property
    def progress(self) -> float:
        """The share of its bytes that is in the object tier, from 0 to 1, as this host sees it."""
        if not self._ended.done() or self._ended.exception() is not None:
            return 0.0
        checkpoint = self._run.checkpoint(self.step)
        files = checkpoint.files()
        there = sum(
            length
            for name, length in files.items()
            if level_of(checkpoint.store, inside(checkpoint.directory, name)) is Level.OBJECT
        )
        return there / max(1, sum(files.values()))

    def cancel(self) -> bool:
        """Have the save not be made, if it has not begun. What one rank cancels no rank saves.

        Returns:
            Whether it will not be made, as far as this rank knows: it is done if another rank has begun already.
        """
        self._cancelled = True
        return not self._ended.done() and self._order is not None

    def end(self, error: BaseException | None = None, mark: SaveMark | None = None) -> None:
        """Take note of how it ended."""
        self._mark, self._order = mark, None
        self._seconds = time.monotonic() - self._asked_s
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class SaveThread:
    """Makes the saves of one rank, in order; its collectives have a group of their own.

    Args:
        run: Where.
        writer: Saves.
        world: The ranks.
        planner: Makes a planner for each save; ``None`` for torch's own.
        ended: Called with each save, on this thread, when its outcome is known, and with the digests of the state that this rank saved.
    """

    def __init__(
        self,
        run: RunDirectory,
        writer: RunWriter,
        world: World,
        planner: Callable[[], SavePlanner] | None,
        ended: Callable[[SaveHandle, Order, Mapping[str, str]], None],
    ) -> None:
        self._run = run
        self._writer = writer
        self._world = world
        self._planner = planner
        self._on_end = ended
        self._queue: queue.SimpleQueue[tuple[SaveHandle, Order] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, handle: SaveHandle, order: Order) -> None:
        """Have a save made after those that were asked for before."""
        if self._thread is None:
            self._thread = start_daemon(self._work, name="train-save")
        self._queue.put((handle, order))

    def close(self, timeout_s: float) -> bool:
        """Make what was asked for, and end. Returns whether that came to its end in time."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, order = item
            digests: Mapping[str, str] = {}
            try:
                digests = {name: digest for name, digest in digests_of(order.staged).items() if name != ABOUT}
                self._make(handle, order, digests)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the save has to hear of it
                handle.end(reason_of(error))
            self._on_end(handle, order, digests)
            del item, handle, order

    def _make(self, handle: SaveHandle, order: Order, digests: Mapping[str, str]) -> None:
        """Make one, or find out that it need not be made. A collective, in each of its steps."""
        world, group = self._world, self._world.saving
        told = world.gather((digests, None if order.problem is None else str(order.problem), handle._cancelled), group)
        problems = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(told) if problem]
        if problems:
            raise order.problem or TierfsError(f"{handle.url}: another rank could not save: {'; '.join(problems)}")
        if any(is_cancelled for _, _, is_cancelled in told):
            raise TierfsError(f"{handle.url}: the save was cancelled")
        record = {"ranks": [digests for digests, _, _ in told]}
        found = world.from_first(self._look(order, record) if world.is_first else None, group)
        if found == "other":
            raise AlreadyExistsError(
                f"{handle.url} is there, with another content: save with overwrite=True to replace it", path=handle.url
            )
        if found == "same":
            handle.was_there = True
            handle.end()
            return

        def note(save_id: str) -> None:
            self._run.write_note(order.step, RECORD, {"save_id": save_id, **record})
            self._run.write_metrics(order.step, order.metrics)

        self._writer.notes = note
        metadata = dcp.save(
            order.staged,
            storage_writer=self._writer,
            checkpoint_id=handle.url,
            planner=self._planner() if self._planner is not None else None,
            process_group=self._world.saving,
            no_dist=self._world.size == 1,
        )
        meta: Any = metadata.storage_meta
        handle.end(mark=SaveMark(meta.sequence, meta.save_id))

    def _look(self, order: Order, record: Mapping[str, Any]) -> str:
        """Whether the step is there already: ``same``, ``other``, or nothing that keeps it from being saved."""
        try:
            if order.overwrite or self._run.problem_of(order.step):
                return ""
            there = self._run.record_of(order.step)
        except TierfsError as error:
            _logger.warning("%s: whether it is there already is not known: %s", self._run.url_of(order.step), error)
            return ""
        ranks = there.get("ranks") if there is not None else None
        return "other" if not ranks or first_difference(ranks, record["ranks"]) else "same"


def reason_of(error: BaseException) -> BaseException:
    """What torch wrapped, where one rank alone failed."""
    if isinstance(error, CheckpointException):
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        for failure in failures.values():
            if len(failures) == 1 and isinstance(failure, TierfsError):
                return failure
    return error
