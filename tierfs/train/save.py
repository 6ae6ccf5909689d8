"""`SaveThread`: makes one save at a time on its own thread. The ranks agree before each save.

`Course` is the line in which training goes on, with its record in the run's directory.
"""

from __future__ import annotations

import enum
import logging
import queue
import reprlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from tierfs.checkpoint.notes import ABOUT, FILES, FIRST, METRICS, NOTHING, RECORD, Lines, line_of
from tierfs.checkpoint.verify import verify_checkpoint
from tierfs.dcp import TierWriter
from tierfs.errors import AlreadyExistsError, CorruptionError, InvalidInputError, TierfsError
from tierfs.format.checkpoint import SaveMark
from tierfs.store import while_reachable
from tierfs.threads import start_daemon
from tierfs.train.agree import World, reason_of
from tierfs.train.handle import Health, SaveHandle, SaveOrder
from tierfs.train.optimizers import HAS_GRADIENTS
from tierfs.train.policies import Context
from tierfs.train.proof import encode_history
from tierfs.train.restore import Restored
from tierfs.train.retention import Retention
from tierfs.train.run import OWN, RunDirectory
from tierfs.train.values import TENSOR, digests_of, first_difference, without_digest

_logger = logging.getLogger("tierfs.train")


class _State(enum.Enum):
    """The states of a course. `Course.resume` enters `BACK` or `GOING` from any of them."""

    FRESH = "nothing was restored: the first save records the run, which becomes GOING"
    BACK = "training went back to an earlier step: `Course.record_return` records that, and it becomes GOING"
    GOING = "the line is recorded, or goes on as it was"


class Course:
    """The line of a run, the same on every rank. The constructor and `resume` are collectives.

    Attributes:
        run: The id of the run, which names its line.
        lines: The lines of the root; ``None`` if none are recorded.
        newer: Steps after the restored one, which training does not go on from. A save may replace them unless they are
            pinned, and takes its own step out.
    """

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory = directory
        self._world = world
        self._state = _State.FRESH
        self.run: str = world.from_first(secrets.token_hex(8), world.training)
        self.lines: Lines | None = None
        self.newer: set[int] = set()

    def resume(self, found: Restored | None, *, is_choice: bool) -> None:
        """Take the line in which training goes on after a restore.

        Args:
            found: The outcome of the restore.
            is_choice: Whether the user chose the step. Then newer steps are left behind, and a new line begins.
        """

        def look() -> tuple[Any, ...]:
            directory, name = self._directory, secrets.token_hex(8)
            lines = directory.lines()
            if found is not None and is_choice:
                line = line_of(directory.checkpoint(found.step)) or FIRST
                newer = {step for step in directory.candidates() if step > found.step}
                if newer or (lines is not None and not lines.holds(line, found.step)):
                    return _State.BACK, name, (lines or Lines()).begun(name, line, found.step), newer
            current = lines.current if lines is not None else FIRST
            about = found.about if found is not None else None
            newer = {step for step, _ in found.passed_over} if found is not None else set()
            return _State.GOING, current or (about.run if about is not None else name), lines, newer

        self._state, self.run, self.lines, self.newer = self._world.ask_first(look, self._world.training)

    def record_return(self) -> None:
        """Record that training went back to an earlier step, before anything follows from it. Rank 0 does it.

        Raises:
            TierfsError: It could not be recorded.
        """
        if self._state is not _State.BACK:
            return
        if self._world.is_first and self.lines is not None:
            self._directory.write_lines(self.lines)
            steps = reprlib.repr(sorted(self.newer))
            _logger.warning("%s: training went back: it leaves the newer steps %s behind", self._directory.url, steps)
        self._state = _State.GOING

    def record_save(self, step: int) -> None:
        """Record the line after a save, if that is not done, so that foreign checkpoints can be told from the run's own.

        Raises:
            TierfsError: It could not be recorded.
        """
        if self.lines is None and self._world.is_first:
            lines = self._directory.lines()
            has_others = lines is not None or any(each != step for each in self._directory.candidates())
            if self._state is _State.FRESH and has_others:
                lines = (lines or Lines()).begun(self.run, FIRST, NOTHING)
            self._directory.write_lines(lines or Lines())
        self.lines, self._state = self.lines or Lines(), _State.GOING


class _RankReport(NamedTuple):
    """The report of a rank to the others before a save: its digests, its metrics, and whether anything stops the save."""

    digests: dict[str, str]
    unsaved: dict[str, str]
    history: list[Any]
    problem: str | None
    is_cancelled: bool
    is_stale: bool
    has_others: bool


Files = Callable[[int, Mapping[str, str]], Mapping[str, bytes]]
SLOWEST_COUNTS = 0.9
"""A deadline allows for the slowest recent save. Each later save reduces the time of that one by this factor."""


class RunWriter(TierWriter):
    """A writer that writes the notes beside a checkpoint right before it publishes it, so none lacks its notes.

    ``notes`` is called on the coordinator with the save's id, and with the shard file of each value by name.
    """

    notes: Callable[[str, Mapping[str, str]], None] | None = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.notes is not None:
            places = [each for rank in results for each in rank if each.storage_data is not None]
            self.notes(self.running.save_id, {each.index.fqn: each.storage_data[0].file for each in places})
        super().finish(metadata, results)


class SaveThread:
    """Makes the saves of one rank in the order of their requests. Its collectives use `World.saving`.

    Attributes:
        context: Returns the facts that keep policies get. `SaveDecider` sets it.
        save_s: Seconds until a save reached its level, by the slowest recent save; 0 before the first one.
    """

    def __init__(
        self,
        run: RunDirectory,
        writer: RunWriter,
        world: World,
        course: Course,
        keep: Retention,
        health: Health,
        *,
        planner: Callable[[], SavePlanner] | None,
        on_stale: str,
        reads_back: bool,
        files: Files | None,
    ) -> None:
        self._run = run
        self._writer = writer
        self._world = world
        self._course = course
        self._keep = keep
        self._health = health
        self._planner = planner
        self._on_stale = on_stale
        self._reads_back = reads_back
        self._files = files
        self.context: Callable[[], Context]
        self.save_s = 0.0
        self._open = 0
        self._idle = threading.Condition()
        self._retaining = threading.Lock()
        self._newest: SaveHandle | None = None
        self._before: tuple[int, Mapping[str, str]] = (-1, {})  # step and digests of the last save
        self._queue: queue.SimpleQueue[SaveOrder | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_saving(self) -> bool:
        """Whether the save that was requested last is in flight."""
        return self._newest is not None and not self._newest.done

    def submit(self, order: SaveOrder) -> None:
        """Queue a save. If this process cannot start the save thread, the save fails on all ranks."""
        self._newest = order.handle
        if self._thread is None:
            self._thread = start_daemon(self._work, name="train-save")
        if self._thread is None:
            order.problem = order.problem or TierfsError(
                f"{order.handle.url}: this process cannot start a thread to save it"
            )
            self._work_on(order)  # the other ranks wait for this rank's report
            return
        with self._idle:
            self._open += 1
        self._queue.put(order)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all requested saves are done. Return whether they were in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Make the requested saves, and end the thread. Return whether it ended in time."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            try:
                self._work_on(order)
            finally:
                del order  # it holds a copy of the state
                self._note_done()

    def _note_done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _work_on(self, order: SaveOrder) -> None:
        handle = order.handle
        mark: SaveMark | None = None
        error: Exception | None = None
        try:
            mark = self._make(order)
        except BaseException as failure:  # noqa: BLE001 - the handle reports it
            error = reason_of(failure)
        self._health.note(handle, error)
        if error is None:
            if not handle.was_there:
                self.save_s = max(handle.seconds, self.save_s * SLOWEST_COUNTS)
            self._keep.add(handle.step, handle.kind, time.time_ns(), order.metrics)
        handle.end(error, mark)
        self._retain(handle)

    def _retain(self, handle: SaveHandle) -> None:
        """Record the line of the run, and apply retention. The next save does not wait for a silent object tier."""

        def work() -> None:
            with self._idle:
                self._open += 1
            try:
                with self._retaining:
                    if handle.error is None:
                        self._course.record_save(handle.step)
                    self._keep.apply(self.context())
            finally:
                self._note_done()

        try:
            while_reachable(self._run.open()[0], work)
        except TierfsError as error:
            _logger.warning(
                "%s: the work after a save failed, and is repeated after the next: %s", self._run.url, error
            )
        except BaseException as error:  # noqa: BLE001 - a user's policy must not end the save thread
            self._health.note_after(handle, reason_of(error))

    def _make(self, order: SaveOrder) -> SaveMark | None:
        """Make a save, or return ``None`` if the same content is already saved. All its parts are collectives."""
        handle = order.handle
        digests = {name: digest for name, digest in digests_of(order.staged).items() if name != ABOUT}
        world, group = self._world, self._world.saving
        problem = None if order.problem is None else str(order.problem)
        history = encode_history(order.history)
        stale, others = self._is_stale(order, digests), bool(without_digest(order.staged))
        mine = _RankReport(digests, digests_of(order.unsaved), history, problem, handle.begin(), stale, others)
        told: list[_RankReport] = world.gather(mine, group)
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(told) if each.problem]
        if problems:
            raise order.problem or TierfsError(f"{handle.url}: another rank could not save: {'; '.join(problems)}")
        if any(each.is_cancelled for each in told):
            raise TierfsError(f"{handle.url}: the save was cancelled")
        if all(each.is_stale for each in told):
            self._say_stale(handle)
        record = {"ranks": [each.digests for each in told], "history": [each.history for each in told]}
        record["unsaved"] = [each.unsaved for each in told]
        found = world.from_first(self._look(order, record) if world.is_first else None, group)
        if found == "same" and any(each.has_others for each in told):
            found = ""  # values that nothing compares may differ
        if found == "other":
            raise AlreadyExistsError(
                f"{handle.url} already exists with other content: to replace it, restore an earlier step first, or "
                "save with overwrite=True",
                path=handle.url,
            )
        if found == "same":
            self._verify(handle)  # it may be there because only this failed
            handle.was_there = True
            return None

        def note(save_id: str, places: Mapping[str, str]) -> None:
            self._course.record_return()
            files = self._files(handle.step, places) if self._files is not None else {}
            for name, data in files.items():
                self._run.write_file(handle.step, name, data)
            if files:
                self._run.write_note(handle.step, FILES, {name: len(data) for name, data in files.items()})
            known = {"known": self._keep.told()}
            self._run.write_note(handle.step, RECORD, {"save_id": save_id, **record, **known})
            self._run.write_note(handle.step, METRICS, order.metrics)  # ``tierfs prune`` reads them, too

        self._writer.notes, self._writer.facts = note, {"kind": handle.kind, "run": order.run}
        metadata = dcp.save(
            order.staged,
            storage_writer=self._writer,
            checkpoint_id=handle.url,
            planner=self._planner() if self._planner is not None else None,
            process_group=self._world.saving,
            no_dist=self._world.size == 1,
        )
        meta: Any = metadata.storage_meta
        self._course.newer.discard(handle.step)
        self._verify(handle)
        self._before = handle.step, digests
        return SaveMark(meta.sequence, meta.save_id)

    def _is_stale(self, order: SaveOrder, digests: Mapping[str, str]) -> bool:
        """Return whether this rank's tensors all equal those of the last saved step. Random generators do not count."""
        step, before = self._before
        tensors = {name for name in digests if digests[name][0] == TENSOR and not name.startswith(OWN)}
        # Only tensors that this rank has in both saves can be compared.
        both = tensors & before.keys()
        return step != order.handle.step and bool(both) and all(digests[name] == before[name] for name in both)

    def _say_stale(self, handle: SaveHandle) -> None:
        text = (
            f"{handle.url}: every tensor is the same as at step {self._before[0]}: "
            "check that the saved state is the one being trained"
        )
        if self._on_stale == "raise":
            raise InvalidInputError(text)
        if self._on_stale == "warn" and self._world.is_first:
            _logger.warning(text)

    def _verify(self, handle: SaveHandle) -> None:
        if not self._reads_back:
            return
        world = self._world
        damage, problem = world.from_first(self._read_back(handle) if world.is_first else ("", ""), world.saving)
        if damage:
            raise CorruptionError(
                f"{handle.url} does not read back as it was saved, and is marked as damaged: {damage}"
            )
        if problem:
            raise TierfsError(f"{handle.url} was saved, but cannot be verified: {problem}")

    def _read_back(self, handle: SaveHandle) -> tuple[str, str]:
        """Read a save back from the tier that has it, and mark it if it is damaged.

        Returns:
            The damage, and why the save could not be read or marked; both in words, empty for none.
        """
        damage = ""
        try:
            report = verify_checkpoint(self._run.checkpoint(handle.step))
            damage = "; ".join(each.problem for each in report.damage)
            if damage:
                self._run.mark_damaged(handle.step, damage)
        except TierfsError as error:
            return damage, str(error)
        return damage, ""

    def _look(self, order: SaveOrder, record: Mapping[str, Any]) -> str:
        """Compare the step's existing checkpoint: ``same`` or ``other`` content, or empty if the save may write.

        It may write the same content with other facts beside it, such as the epoch.
        """
        step = order.handle.step

        def look() -> str:
            if self._run.problem_of(step) or (step in self._course.newer and not self._run.is_pinned(step)):
                return ""
            there = self._run.record_of(step)
            ranks = there.get("ranks") if there is not None else None
            if there is None or not ranks or first_difference(ranks, record["ranks"]):
                return "other"
            about = self._run.about(self._run.checkpoint(step))
            said = about.state if about is not None else {}
            facts = [[each.get(name) for name in ("epoch", HAS_GRADIENTS)] for each in (said, order.said)]
            return "same" if facts[0] == facts[1] and there.get("unsaved") == record["unsaved"] else ""

        try:
            return "" if order.overwrite else while_reachable(self._run.open()[0], look)
        except TierfsError as error:
            _logger.warning("%s: cannot check for an earlier save, so it is saved: %s", order.handle.url, error)
            return ""
