"""`Manager`: decides with all ranks when to save, saves behind training's back, restores, and keeps what is to be kept."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from tierfs.checkpoint.retention import Best, Every
from tierfs.dcp.address import Address
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.train.agree import Agreed, World
from tierfs.train.decider import LIGHT, SaveDecider
from tierfs.train.digests import digests_of
from tierfs.train.handle import SaveHandle, SaveOrder
from tierfs.train.health import FailedSave, Health
from tierfs.train.policies import Preemption, as_save_policies
from tierfs.train.proof import UNKNOWN, PartCheck, Prover, ResumeReport, history_in
from tierfs.train.restore import Restored, Restorer
from tierfs.train.retention import Retention
from tierfs.train.run import About, RunDirectory, SavedStep
from tierfs.train.save import RunWriter, SaveChecks, SaveThread
from tierfs.train.state import as_state
from tierfs.train.timing import StepTimer

__all__ = ["Manager"]

KINDS = ("light", "full")
WAITING_MAX = 2
"""Saves that may be under way: one that is written, and one whose state was copied meanwhile."""
HISTORY_STEPS = 256
"""Each save records the metrics of this many steps before it, for a proof of resume."""
_logger = logging.getLogger("tierfs.train")


class Manager:
    """Saves and restores a training run's checkpoints, ``step_N`` below a root.

    All ranks construct it, and call each of its methods that says so, together. A context manager: leaving it waits for what is under
    way.

    Args:
        root: The run's directory: any URL that `TierWriter` takes.
        save: When to save: policies of which any may ask for it.
        light: The same for light checkpoints, without optimizer and data loader.
        keep: What to keep: policies, of which any may want a checkpoint; or a dict of them by tier, ``object``, ``nvme`` and ``ram``.
            None keeps everything. Only this run's own checkpoints are removed, never the one that it was restored from, nor the
            newest at each level.
        ack: The level at which a save is done: ``"staged"``, ``"local"`` or ``"object"``.
        on_error: ``"warn"``: a failed save is logged, and in `errors`. ``"raise"``: the next step raises.
        max_failures: After so many failures in a row the next step raises in any case.
        max_age: So does it when no step has reached the object tier for so long, like ``"2h"``.
        on_stale: What a save is worth whose tensors are all as they were in the one before, at another step: ``"warn"``, ``"raise"`` for
            a failed save, or ``"ignore"``.
        verify_after_save: Whether every save is read back before it counts as done.
        on_corrupt: ``"previous"``: a step that cannot be loaded is passed over. ``"raise"``: it is an error.
        timeout: Seconds that a rank waits for the others, and that leaving waits for saves that are under way.
        planner: Makes a planner for each save, by default torch's.
        **options: Those of `TierWriter`: ``stage``, ``device``, ``ram``, ``nvme``, ``state_dir``, ``create``, and a mapping for the object
            tier's filesystem by its protocol.

    Raises:
        InvalidInputError: An argument is no good.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: Iterable[Any] = (Every(minutes=20), Preemption()),
        light: Iterable[Any] = (),
        keep: Iterable[Any] | Mapping[str, Iterable[Any]] = (),
        ack: str = "staged",
        on_error: str = "warn",
        max_failures: int = 3,
        max_age: str | None = None,
        on_stale: str = "warn",
        verify_after_save: bool = False,
        on_corrupt: str = "previous",
        timeout: float = 1800.0,
        planner: Callable[[], SavePlanner] | None = None,
        **options: Any,
    ) -> None:
        if on_corrupt not in {"previous", "raise"}:
            raise InvalidInputError(f"on_corrupt is 'previous' or 'raise', not {on_corrupt!r}")
        if on_stale not in {"warn", "raise", "ignore"}:
            raise InvalidInputError(f"on_stale is 'warn', 'raise' or 'ignore', not {on_stale!r}")
        Level.parse(ack)
        self._health = Health(on_error, max_failures, max_age)
        full_policies, light_policies = as_save_policies(save), as_save_policies(light)
        placing = {name: options.pop(name) for name in ("stage", "device") if name in options}
        options["ack"] = ack  # for the notes beside a checkpoint, too
        address = Address.of(root, options)
        self._timeout_s = timeout
        self._world = World(timeout)
        if self._world.size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self._run = RunDirectory(address)
        writer = RunWriter(root, **placing, **options)
        checks = SaveChecks(on_stale, reads_back=verify_after_save)
        self._saves = SaveThread(
            self._run,
            writer,
            self._world,
            planner,
            checks,
            self._noted,
            self._ended,
            self._after_save,
            self._health.note_after,
        )
        self._keep = Retention(
            self._run, keep, removes=self._world.is_first, evicts=os.environ.get("LOCAL_RANK", "0") == "0"
        )
        self._writer = writer
        self._restorer = Restorer(self._run, options, self._world)
        self._on_corrupt = on_corrupt
        self._run_id = secrets.token_hex(8)
        self._handles: deque[SaveHandle] = deque(maxlen=WAITING_MAX)
        self._last: tuple[int, Any, Mapping[str, float] | None] | None = None
        self._history: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=HISTORY_STEPS)
        self._restored: Restored | None = None  # while no step was made since
        self._is_stopping = False
        self._signal = 0
        self._decider = SaveDecider(self._world, self._health, full_policies, light_policies, self._is_saving)

    def __repr__(self) -> str:
        return f"Manager({self._run.url!r}, rank={self._world.rank} of {self._world.size})"

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self._signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    # -- saving --------------------------------------------------------------------------------------------------------

    def step(self, step: int, state: Any, *, metrics: Mapping[str, float] | None = None) -> SaveHandle | None:
        """Take note that a step was made, and save if a policy of any rank asks for it. A collective, of all ranks at each step.

        Args:
            step: Which one.
            state: A dict of tensors and objects with ``state_dict``, or a `TrainState`. Only read, and safe to change at return.
            metrics: Numbers to keep with the checkpoint.

        Returns:
            The save, if there is one.
        """
        self._last = step, state, metrics
        self._restored = None
        if metrics:
            self._history.append((step, metrics))
        with self._decider.at_step(step) as agreed:
            return self._act(agreed)

    def check(self) -> bool:
        """Take note of signals between steps: in a long evaluation, while something compiles. A collective.

        Call it equally often on every rank. Where training is to end it saves what the last `step` was given, as it is now.

        Returns:
            Whether training is to end: the same as `stopping`, on every rank.
        """
        if self._last is None or self._is_stopping:
            return self._is_stopping
        with self._decider.at_check(self._last[0]) as agreed:
            if agreed.stop:  # a periodic save can wait for the next step; one before the end cannot
                self._act(agreed)
        return self._is_stopping

    @property
    def stopping(self) -> bool:
        """Whether training is to end. It is the same on every rank at the same step."""
        return self._is_stopping

    def _act(self, agreed: Agreed) -> SaveHandle | None:
        """Do what the ranks agreed on. Raises as `Health.check` does."""
        self._health.check(agreed)
        assert self._last is not None, "an agreement follows a step"
        step, state, metrics = self._last
        saved = None
        if agreed.wish or agreed.stop:
            kind = "light" if agreed.wish == LIGHT and not agreed.stop else "full"
            saved = self.save(step, state, kind=kind, metrics=metrics)
        if agreed.stop:
            self._is_stopping = True
            self._signal = agreed.signal
            why = signal.Signals(agreed.signal).name if agreed.signal else "a deadline"
            _logger.warning("training ends at step %d because of %s", step, why)
            if saved is not None:
                self._secure(saved)
        return saved

    def _secure(self, saved: SaveHandle) -> None:
        """Wait until a save survives the end of this host's processes, as long as there is time for that."""
        try:
            saved.wait("local", timeout=self._decider.left_s)
        except Exception as error:  # noqa: BLE001 - there is nothing left to do but to say so
            _logger.error("%s is not safe on this host: %s", saved.url, error)  # noqa: TRY400 - a trace says no more

    def should_save(self, step: int) -> bool:
        """Whether a policy asks for a save at this step, as far as this rank knows."""
        return bool(self._decider.wish(step))

    def _is_saving(self) -> bool:
        return bool(self._handles) and not self._handles[-1].done

    def save(
        self,
        step: int,
        state: Any,
        *,
        kind: str = "full",
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Save now. Returns when the state is copied, and training may change it. A collective.

        Args:
            step: Of the training.
            state: As for `step`.
            kind: ``"full"``, or ``"light"`` to leave the optimizer and the data loader out.
            force: Save a step again that this manager has just saved; else the save that there is is returned.
            overwrite: Whether another content that was saved for this step may be replaced. A full save always replaces the light one
                that was just made of the same step.
            metrics: Numbers to keep with the checkpoint.

        Raises:
            InvalidInputError: The state or an argument is no good.
        """
        if kind not in KINDS:
            raise InvalidInputError(f"kind is 'full' or 'light', not {kind!r}")
        last = self._handles[-1] if self._handles else None
        if last is not None and last.step == step and last.kind == kind and not force and not self._has_failed(last):
            return last
        if last is not None and (last.step, last.kind, kind) == (step, "light", "full"):
            overwrite = True  # it has all that the light one has
        begun = time.perf_counter()
        if len(self._handles) == WAITING_MAX:
            self._handles[0].settle(self._timeout_s)
        order = SaveOrder(step, kind, metrics=dict(metrics or {}), history=tuple(self._history), overwrite=overwrite)
        handle = SaveHandle(self._run, order)
        try:
            values, said = as_state(state).to_save(step, kind)
            timer = self._decider.timer
            about = About(step, kind, self._world.size, self._run_id, timer.blocked_s, timer.save_s, said)
            staged: Any = self._writer.stage(about.added_to(values))
            order.staged = staged
        except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it
            order.problem = error
        self._handles.append(handle)
        self._saves.submit(handle, order)
        if isinstance(order.problem, InvalidInputError):
            raise order.problem
        handle.blocked_s = time.perf_counter() - begun
        self._decider.made_save(step, handle.blocked_s)
        return handle

    def _has_failed(self, handle: SaveHandle) -> bool:
        """Whether any rank knows by now that a save failed. A collective: ranks hear of that at different times."""
        return bool(self._world.begin_greatest([int(handle.error is not None)], self._world.training)()[0])

    def _noted(self) -> Mapping[str, Any]:
        """The facts that a resumed run needs beside the state."""
        return {"known": self._keep.told()}

    def _ended(self, handle: SaveHandle, order: SaveOrder, error: Exception | None) -> None:
        """Take note of a save's outcome, on the thread that made it."""
        self._health.note(handle, error)
        if error is None:
            if not handle.was_there:
                self._decider.timer.reached_level(handle.seconds)
            self._keep.add(handle.step, time.time_ns(), order.metrics)

    def _after_save(self, handle: SaveHandle) -> None:
        """Apply retention, on the thread that saves."""
        try:
            self._keep.apply(self._decider.context())
        except TierfsError as error:
            _logger.warning("%s: retention has to wait: %s", self._run.url, error)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is under way on this rank, and retention has followed.

        Raises:
            TimeoutError: One is, after that time.
        """
        if not self._saves.wait(timeout):
            raise TimeoutError(f"{self._run.url}: a save has not come to its end within {timeout} s")

    @property
    def errors(self) -> list[FailedSave]:
        """The saves of this rank that failed, or whose retention failed, the oldest first."""
        return self._health.errors

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(self, state: Any, *, step: int | None = None, only: Sequence[str] = ()) -> Restored | None:
        """Load the newest step that every rank can load, in place. A collective.

        Args:
            state: As for `step`.
            step: Load this one.
            only: Patterns of names as in a shell, ``["model.*"]``; the rest of the state stays as it is.

        Returns:
            What was loaded; ``None`` only where the root has no complete checkpoint.

        Raises:
            CorruptionError: No complete step can be loaded, or the newest, with ``on_corrupt="raise"``.
            Exception: It failed, for a reason that another step does not help with.
        """
        self.wait(self._timeout_s)
        found = self._restorer.restore(state, step=step, only=only, on_corrupt=self._on_corrupt)
        timer = self._decider.timer = StepTimer()
        if found is not None and found.about is not None:
            timer.blocked_s, timer.save_s = found.about.blocked_s, found.about.save_s
            if not only:
                self._run_id = found.about.run
                self._keep.resume(found.step)
                self._history.clear()
                record = self._run.record_of(found.step)
                self._history.extend(history_in(record, self._world.rank))
        self._restored = found if not only else None
        return found

    def latest(self, level: str | None = None) -> int | None:
        """The newest step that can be loaded, as far as this host sees it without reading; ``None`` where there is none.

        Args:
            level: At which it is at least.
        """
        wanted = Level.NONE if level is None else Level.parse(level)
        for step, found in self._run.complete():
            if found.level is not None and found.level >= wanted:
                return step
        return None

    @property
    def checkpoints(self) -> list[SavedStep]:
        """All that lies below the root, as this host sees it, the oldest first."""
        return [self._run.describe(step) for step in self._run.steps()]

    def verify_resume(
        self,
        state: Any,
        train: Callable[[int], float] | None = None,
        *,
        steps: int = 8,
        metric: str = "loss",
        tolerance: float = 0.0,
    ) -> ResumeReport:
        """Prove that training goes on as if it had never stopped. A collective.

        The newest step is restored, unless that was just done, and compared with the digests noted when it was saved: weights, optimizer,
        schedule, random generators, data loader. Then an earlier checkpoint is restored, and the steps after it are made again: their losses
        have to be those that `step` was told. In the end the newest step is restored once more, and training goes on from there.

        Args:
            state: As for `step`.
            train: Makes one step of training without calling `step`, and returns its loss as `step` got it. ``None`` for no replay.
            steps: How many steps to make again at most.
            metric: Name of the loss among the metrics. Those of the last 256 steps are noted with each save.
            tolerance: How far losses may lie apart, as a share; 0 for not a bit. On a GPU, bits differ where kernels are not deterministic.

        Raises:
            NotFoundError: There is no complete checkpoint.
            Exception: As for `restore`.
        """
        restored = self._restored or self.restore(state)
        if restored is None:
            raise NotFoundError(f"{self._run.url} has no complete checkpoint: there is nothing to resume from")
        trained = as_state(state)
        has_step = trained.step  # `to_save` sets it
        values, _ = trained.to_save(restored.step, restored.kind)
        prover = Prover(self._run, self._world, restored)
        checks = prover.compare(digests_of(values), has_step, trained.learning_rates)
        if train is None:
            return ResumeReport(restored.step, (), tuple(checks))
        begin, replayed, recorded = prover.plan(metric, steps)
        if replayed:
            self.restore(state, step=begin)
            checks.append(prover.replay(train, replayed, recorded, tolerance))
            self.restore(state, step=restored.step)
        else:
            why = f"no earlier checkpoint has steps after it of which {metric!r} was noted"
            checks.append(PartCheck("losses", UNKNOWN, why))
        return ResumeReport(restored.step, replayed, tuple(checks))

    def best(self, metric: str, *, mode: str = "min") -> int | None:
        """The step with the least value of a metric, or with ``mode="max"`` the greatest, of those that can be loaded.

        Raises:
            InvalidInputError: There is no such mode.
        """
        return self._run.best(Best(1, metric, mode))

    def pin(self, step: int) -> None:
        """Keep a step, whatever the policies say, until `unpin`. Call it on one rank.

        Raises:
            NotFoundError: It is not there.
        """
        self._run.pin(step)

    def unpin(self, step: int) -> None:
        """Let the policies decide again. Call it on one rank."""
        self._run.unpin(step)

    def delete(self, step: int) -> None:
        """Remove a step's checkpoint. Call it on one rank.

        Raises:
            InvalidInputError: It is pinned.
            NotFoundError: It is not there.
            ConflictError: It was saved anew meanwhile.
        """
        self._run.remove(step)
        self._keep.forget(step)

    def close(self) -> None:
        """Wait for the saves that are under way, and end. Signals go to the handlers that were there before."""
        self._decider.close()
        if not self._saves.close(self._timeout_s):
            _logger.error("%s: a save did not come to its end within %g s", self._run.url, self._timeout_s)
        self._world.close()
