"""`Manager`: decides with all ranks when to save, saves while training goes on, restores, and prunes."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from tierfs.checkpoint.retention import Best, Every
from tierfs.dcp import TierSavePlanner
from tierfs.dcp.address import Address
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.train.agree import Agreed, World
from tierfs.train.decider import LIGHT, SaveDecider, StepTimer
from tierfs.train.handle import FailedSave, Health, SaveHandle, SaveOrder
from tierfs.train.policies import Preemption, as_save_policies
from tierfs.train.proof import History, Prover, ResumeReport, history_in
from tierfs.train.replay.again import StepsAgain
from tierfs.train.replay.policy import Replay
from tierfs.train.replay.recorder import Recorder
from tierfs.train.restore import ACCEPTED, Restored, Restorer
from tierfs.train.retention import Retention
from tierfs.train.run import About, RunDirectory, SavedStep, checked_metrics, checked_step
from tierfs.train.save import Course, Files, RunWriter, SaveThread
from tierfs.train.state import as_state
from tierfs.units import TIMEOUT_S_MAX, bounded_timeout

KINDS = ("light", "full")
WAITING_MAX = 2
"""Saves that may be in flight: one that is being written, and one whose state is already copied."""
_logger = logging.getLogger("tierfs.train")


class Manager:
    """Saves and restores the checkpoints of a training run, ``step_N`` below a root.

    The constructor and some methods are collectives: all ranks call them together, in the same order. A manager is a
    context manager: leaving the block calls `close`. If SIGTERM ended training, or this rank got SIGTERM at any time, it
    then raises ``SystemExit(143)``.

    Args:
        root: The run's directory: any URL that `TierWriter` takes.
        save: Policies for full checkpoints. A save happens if a policy of any rank asks for it.
        light: Policies for light checkpoints, which leave out the optimizer and the data loader: see `save`.
        keep: Policies that keep checkpoints; a checkpoint stays if any of them wants it. Or a dict of policies by tier:
            ``object``, ``nvme`` and ``ram``, the last two for local copies. Without policies, everything stays. The
            manager only removes checkpoints of this run. It never removes the checkpoint that the run was restored
            from, the newest one at each level, a pinned one or an incomplete one.
        ack: The level at which a save is done: ``"staged"``, ``"local"``, ``"peer"`` or ``"object"``.
        on_error: ``"warn"``: a failed save is logged and listed in `errors`. ``"raise"``: the next step raises, too.
        max_failures: After this many failures in a row, the next step raises in any case.
        max_age: The next step also raises if no step has reached the object tier for this long, such as ``"2h"``.
        on_stale: The treatment of a save whose tensors all equal those of the last saved step: ``"warn"`` logs a
            warning, ``"raise"`` makes it a failed save, ``"ignore"`` accepts it.
        verify_after_save: Whether each save is read back before it counts as done.
        on_corrupt: ``"previous"``: `restore` passes over a step that cannot be loaded. ``"raise"``: it raises.
        timeout: Seconds that a rank waits for the others, and that `close` waits for saves in flight.
        planner: Returns a new DCP save planner for each save; ``None`` for torch's own. `TierSavePlanner` saves the same.
        files: Returns small files by name, which a save writes beside the checkpoint before it publishes it. Called on
            rank 0, on the thread that saves, with the step and the shard file of each saved value by name.
        **options: Options of `TierWriter`: ``stage``, ``device``, ``ram``, ``nvme``, ``state_dir``, ``create``, and a
            mapping for the object tier's filesystem by its protocol, such as ``s3={...}``.

    Raises:
        InvalidInputError: An argument is invalid.
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
        planner: Callable[[], SavePlanner] | None = TierSavePlanner,
        files: Files | None = None,
        **options: Any,
    ) -> None:
        if on_corrupt not in {"previous", "raise"}:
            raise InvalidInputError(f"on_corrupt must be 'previous' or 'raise', not {on_corrupt!r}")
        if on_stale not in {"warn", "raise", "ignore"}:
            raise InvalidInputError(f"on_stale must be 'warn', 'raise' or 'ignore', not {on_stale!r}")
        Level.parse(ack)
        self._health = Health(on_error, max_failures, max_age)
        full_policies, light_policies = as_save_policies(save), as_save_policies(light, "light")
        placing = {name: options.pop(name) for name in ("stage", "device") if name in options}
        options["ack"] = ack  # for the notes beside a checkpoint, too
        address = Address.of(root, options)
        if timeout < 0:
            raise InvalidInputError(f"timeout must be 0 or more seconds, not {timeout}")
        self._timeout_s = TIMEOUT_S_MAX if bounded_timeout(timeout) is None else timeout
        self._world = World(self._timeout_s)
        if self._world.size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self._run = RunDirectory(address)
        self._writer = RunWriter(root, **placing, **options)
        self._restorer = Restorer(self._run, options, self._world)
        self._on_corrupt = on_corrupt
        self._course = Course(self._run, self._world)
        self._keep = Retention(
            self._run, keep, removes=self._world.is_first, evicts=os.environ.get("LOCAL_RANK", "0") == "0"
        )
        self._saves = SaveThread(
            self._run,
            self._writer,
            self._world,
            self._course,
            self._keep,
            self._health,
            planner=planner,
            on_stale=on_stale,
            reads_back=verify_after_save,
            files=files,
        )
        replay = next((each for each in full_policies if isinstance(each, Replay)), None)
        self._log = Recorder(replay, self._run, self._world) if replay is not None else None
        self._unlogged = self._log.paused if self._log is not None else nullcontext
        self._again: StepsAgain | None = None
        self._decider = SaveDecider(self._world, self._health, full_policies, light_policies, self._saves)
        self._pid = os.getpid()
        self._handles: deque[SaveHandle] = deque(maxlen=WAITING_MAX)
        self._steps = 0  # before the first save
        self._last: tuple[int, Any, Mapping[str, Any]] | None = None
        self._history = History()
        self._restored: Restored | None = None  # None once a step was made since
        self._chosen: int | None = None  # the step that the user chose to restore
        self._is_stopping = self._is_closed = False
        self._signal = 0

    def __repr__(self) -> str:
        return f"Manager({self._run.url!r}, rank={self._world.rank} of {self._world.size})"

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._world.size == 1 and not self._is_closed:
                self.check()  # a signal may have come after the last step
        finally:
            self.close()
        if kind is None and (self._signal == signal.SIGTERM or self._decider.is_terminated):
            raise SystemExit(128 + signal.SIGTERM)

    # -- saving --------------------------------------------------------------------------------------------------------

    def step(self, step: int, state: Any, *, metrics: Mapping[str, float] | None = None) -> SaveHandle | None:
        """Record a finished training step, and save if a policy of any rank asks for it. A collective.

        Every rank calls this after every step.

        Args:
            step: The step that was made, from 0 to 10**18 - 1.
            state: A `TrainState`, or a dict of tensors and objects with ``state_dict``. It is only read. Training may
                change it after this returns.
            metrics: Numbers by name, or tensors of one number. They are kept with the checkpoint for `best` and keep
                policies, and recorded for `verify_resume` even if this step is not saved.

        Returns:
            The save; ``None`` if there is none at this step.

        Raises:
            InvalidInputError: The state cannot be saved, an argument is invalid, or the manager is closed.
            ConflictError: Ranks are not at the same step.
            TierfsError: Too many saves failed, or no step has reached the object tier within ``max_age``.
        """
        self._check_open()
        step, taken = checked_step(step), checked_metrics(metrics)
        self._last = step, state, taken
        if self._restored is not None:
            self._restored = None
            try:
                if not self._saves.is_saving:  # otherwise that save records it
                    self._course.record_return()
            except TierfsError as error:
                _logger.warning("%s: the new line is recorded with the next save: %s", self._run.url, error)
        if taken:
            self._history.add(step, taken)
        if not self._handles:
            self._steps += 1
            if self._steps.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: gradients may be accumulated for some steps
                self.prepare(state)
        if self._log is not None:
            self._log.made_step(step, as_state(state), taken)
        with self._decider.at_step(step) as agreed:
            return self._act(agreed)

    def check(self) -> bool:
        """React to signals between steps, for example during a long evaluation. A collective.

        Call it equally often on every rank. If training has to end, it saves the state that the last `step` got, with
        its present content. It raises as `step` does.

        Returns:
            Whether training has to end, as `stopping`.
        """
        if self._last is None or self._is_stopping:
            return self._is_stopping
        with self._decider.at_check(self._last[0]) as agreed:
            if agreed.stop:  # a periodic save can wait for the next step, the last save cannot
                self._act(agreed)
        return self._is_stopping

    @property
    def stopping(self) -> bool:
        """Whether training has to end, because a policy ends it. It is the same on all ranks at the same step."""
        return self._is_stopping

    def _act(self, agreed: Agreed) -> SaveHandle | None:
        """Save and stop as the ranks agreed. Raises as `Health.check` and `save` do."""
        self._health.check(agreed)
        assert self._last is not None, "an agreement follows a step"
        if agreed.stop:
            self._meet()
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

    def _meet(self) -> None:
        """Wait until every rank has come here. Waits for a rank that is stuck end with the grace period only here."""
        self._world.begin_greatest([0], self._world.training)()

    def _settle(self, saved: SaveHandle) -> None:
        """Wait until a save has ended; not for ever, if a rank is stuck in it: see `_meet`."""
        ends_s = time.monotonic() + self._timeout_s
        self._world.wait_for(
            lambda seconds: saved.settle(seconds) or time.monotonic() >= ends_s,
            lambda: f"the save of step {saved.step} did not end",
        )

    def _secure(self, saved: SaveHandle) -> None:
        """Wait until a save has reached the level ``local``, for as long as the grace period allows."""
        try:
            saved.wait("local", timeout=self._decider.left_s)
        except Exception as error:  # noqa: BLE001 - it can only be reported
            _logger.error("%s did not reach the level local: %s", saved.url, error)  # noqa: TRY400 - a trace is noise

    def prepare(self, state: Any) -> None:
        """Begin to make memory for the saves of a state: see `TierWriter.prepare`. `step` calls this."""
        self._writer.prepare(state if isinstance(state, Mapping) else getattr(state, "__dict__", {}))

    def should_save(self, step: int) -> bool:
        """Return whether a policy of this rank asks for a save at this step."""
        return bool(self._decider.wish(step))

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
        """Save now. Return when the state is copied, so that training may change it. A collective.

        If two saves are in flight, this first waits for the older one.

        Args:
            step: The training step.
            state: As for `step`.
            kind: ``"full"`` or ``"light"``. A light checkpoint of a `TrainState` has the model, the scheduler, the
                random generators and the step. That of a dict has all entries but ``"optimizer"``.
            force: Save again, even if the last save of this manager was of this step and kind. Otherwise that save is
                returned, unless it failed.
            overwrite: Whether to replace a checkpoint of this step with different content. Without it, such a save
                fails with `AlreadyExistsError`. Values that tierfs cannot compare, such as sets and dataclasses, do not
                count as different, and are replaced. A full save always replaces a light save of the same step if that was
                this manager's last one.
            metrics: Numbers to keep with the checkpoint.

        Returns:
            The save in flight. If it fails, its ``error`` and `errors` tell the reason.

        Raises:
            InvalidInputError: The state or an argument is invalid, or the manager is closed.
        """
        if kind not in KINDS:
            raise InvalidInputError(f"kind must be 'full' or 'light', not {kind!r}")
        self._check_open()
        step, taken, parts = checked_step(step), checked_metrics(metrics), as_state(state)
        last = self._handles[-1] if self._handles else None
        if last is not None and last.step == step and last.kind == kind and not force and not self._has_failed(last):
            return last
        if last is not None and (last.step, last.kind, kind) == (step, "light", "full"):
            overwrite = True  # the full save contains all of the light one
        begun = time.perf_counter()
        if len(self._handles) == WAITING_MAX:
            self._meet()
            self._settle(self._handles[0])
        numbers = {name: float(value) for name, value in taken.items()}
        handle = SaveHandle(self._run, step, kind)
        order = SaveOrder(handle, self._course.run, numbers, self._history.recorded(), overwrite)
        try:
            chain = self._log.before_save(step, parts) if self._log is not None and kind == "full" else {}
            with self._unlogged():
                values, order.said = parts.to_save(step, kind)
            costs = self._decider.timer.blocked_s, self._saves.save_s
            order.unsaved = parts.unsaved()
            about = About(step, kind, self._world.size, self._course.run, *costs, {**order.said, **chain})
            staged: Any = self._writer.stage(about.added_to(values))
            order.staged = staged
        except Exception as error:  # noqa: BLE001 - reported to the other ranks
            order.problem = error
        self._handles.append(handle)
        self._saves.submit(order)
        if isinstance(order.problem, InvalidInputError):
            raise order.problem
        if kind == "full":
            self._history.saved(step)
        if chain and self._log is not None:
            self._log.saved(step, parts, handle)
        handle.blocked_s = time.perf_counter() - begun
        self._decider.made_save(step, handle.blocked_s)
        return handle

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"{self._run.url}: the manager is closed and cannot save")
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"{self._run.url}: this process was forked, and the manager belongs to its parent: make another one here"
            )

    def _has_failed(self, handle: SaveHandle) -> bool:
        """Return whether any rank knows that a save failed. A collective: ranks notice it at different times."""
        return bool(self._world.begin_greatest([int(handle.error is not None)], self._world.training)()[0])

    def wait(self, timeout: float | None = None) -> None:
        """Wait until this rank has no save in flight and has applied retention.

        Args:
            timeout: In seconds; ``None`` waits without a limit.

        Raises:
            TimeoutError: A save is still in flight after ``timeout``.
        """
        if not self._saves.wait(bounded_timeout(timeout)):
            raise TimeoutError(
                f"{self._run.url}: a save or its retention did not finish within {timeout} s; it continues"
            )

    @property
    def errors(self) -> list[FailedSave]:
        """The last hundred saves of this rank that failed, or after which retention failed, the oldest first."""
        return self._health.errors

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        only: Sequence[str] | str = (),
        kind: str = "full",
        verify: bool = True,
    ) -> Restored | None:
        """Load the newest step that every rank can load, in place. A collective.

        Args:
            state: As for `step`.
            step: Load this step instead of the newest one. With `Replay`, it may be a logged step. If training goes on
                from there, it leaves newer steps behind: a later restore passes over them, a save replaces them, and
                no policy keeps them.
            only: Shell patterns of names, such as ``["model.*"]``, or one of them. The rest of the state stays
                unchanged. ``()`` loads all of it.
            kind: ``"full"`` takes a light checkpoint, with a warning, only if no full one can be loaded. ``"any"``
                takes the newest of both kinds.
            verify: Compare what is then in the state with the digests that the save recorded, at several GB/s of a
                processor, and note what differs. `Restored.is_exact` follows from it. Of a state of over 16 GiB a rank,
                the largest values are not compared.

        Returns:
            The outcome; ``None`` only if the root has no complete checkpoint. Newer steps that were passed over are
            replaced when training reaches them.

        Raises:
            NotFoundError: There is no checkpoint of the given ``step``, and no log that leads to it. In the latter case
                the state may be at an earlier step.
            CorruptionError: There are checkpoints, but none can be loaded. With ``step``, that one is incomplete or
                damaged. With ``on_corrupt="raise"``, the newest one is damaged. The state may hold parts of a
                checkpoint.
            InvalidInputError: The state or ``kind`` is invalid, or no saved value matches ``only``.
            Exception: Loading failed for a reason that an older step would not avoid.
        """
        if kind not in ACCEPTED:
            raise InvalidInputError(f"kind must be 'full' or 'any', not {kind!r}")
        self.wait(self._timeout_s)
        only = (only,) if isinstance(only, str) else only
        base = step
        if step is not None and self._log is not None and not only:
            base = self._world.ask_first(partial(self._run.before, step), self._world.training)
        with self._unlogged():
            found = self._restorer.restore(
                state, step=base, only=only, kind=kind, on_corrupt=self._on_corrupt, verify=verify
            )
        timer = self._decider.timer = StepTimer()
        self._saves.save_s = 0.0
        if not only:
            self._course.resume(found, is_choice=step is not None)
        if found is not None and found.about is not None:
            timer.blocked_s, self._saves.save_s = found.about.blocked_s, found.about.save_s
            if not only:
                self._keep.resume(found.step, found.kind, self._course.lines, self._course.newer)
                self._history.resume(found.step, history_in(self._restorer.record, self._world.rank))
        if self._log is not None and found is not None and not only:
            load = partial(self._restorer.restore, state, step=found.step, only=(), kind="full", on_corrupt="raise")
            self._again = StepsAgain(self._log, found, state, load)
            found = self._again.make(until=step)
            for at, metrics in self._again.metrics:
                self._history.add(at, metrics)
        self._restored, self._chosen = found if not only else None, step
        return found

    def latest(self, level: str | None = None) -> int | None:
        """Return the newest step that this host sees complete; ``None`` if there is none. No shard file is read.

        Args:
            level: The lowest level to accept, such as ``"object"``; ``None`` accepts any.

        Raises:
            InvalidInputError: ``level`` is invalid.
        """
        wanted = Level.NONE if level is None else Level.parse(level)
        for step, found in self._run.complete():
            if found.level is not None and found.level >= wanted:
                return step
        return None

    @property
    def checkpoints(self) -> list[SavedStep]:
        """All checkpoints below the root as this host sees them, complete or not, by ascending step."""
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

        It restores the newest step, unless a restore came right before. It compares the state with the digests recorded
        at the save: weights, optimizer, schedule, random generators, data loader. Then it restores an earlier
        checkpoint, makes the steps after it again, and compares their losses with those that `step` got. At the end it
        restores the newest step once more, and training goes on from there.

        Args:
            state: As for `step`.
            train: Makes the given training step without calling `step`, and returns the loss as `step` got it. ``None``
                skips the replay. Then nothing is proven, and the report only compares the state.
            steps: The most steps to replay.
            metric: The name of the loss among the metrics. Each save records the metrics of the last 256 steps, and of
                the 32 steps after each of the last 8 full saves.
            tolerance: The relative difference that losses may have; 0 compares bit for bit. Kernels of a GPU may not be
                deterministic.

        Returns:
            The outcome of each comparison, the same on every rank.

        Raises:
            NotFoundError: There is no complete checkpoint.
            Exception: As for `restore`.
        """
        restored = self._restored or self.restore(state)
        if restored is None:
            raise NotFoundError(f"{self._run.url} has no complete checkpoint: there is nothing to resume from")
        load = partial(self._restorer.restore, state, only=(), kind="full", on_corrupt="raise")
        how: dict[str, Any] = {"steps": steps, "metric": metric, "tolerance": tolerance}
        if restored.replayed and self._again is not None:
            with self._unlogged():
                report = self._again.prove(train, **how)
            # What no checkpoint has is as the same steps left it just now, and not as at the checkpoint.
            again = self.restore(state, step=self._chosen, verify=False)
            return report.left_at(restored, again)
        with self._unlogged():
            prover = Prover(self._run, self._world, restored)
            return prover.prove(as_state(state), train, lambda step: load(step=step), **how)

    def best(self, metric: str, mode: str = "min") -> int | None:
        """Return the complete step with the best value of a metric; ``None`` if no such step has it.

        Args:
            metric: The name of the metric.
            mode: ``"min"``: the smallest value is the best. ``"max"``: the greatest. Among equal values, the newest
                step wins.

        Raises:
            InvalidInputError: ``mode`` is invalid.
        """
        return self._run.best(Best(1, metric, mode))

    def pin(self, step: int) -> None:
        """Forbid the deletion of a step until `unpin`. Call it on one rank.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        self._run.pin(step)

    def unpin(self, step: int) -> None:
        """Let the policies decide about a step again, if it is pinned. Call it on one rank."""
        self._run.unpin(step)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step. Call it on one rank.

        Raises:
            InvalidInputError: The checkpoint is pinned.
            NotFoundError: There is no such checkpoint.
            ConflictError: The step was saved again in the meantime.
        """
        self._run.remove(step)
        self._keep.forget(step)

    def close(self) -> None:
        """Wait for the saves in flight, at most ``timeout``, and restore the previous signal handlers."""
        self._is_closed = True
        self._writer.close()
        if not self._saves.close(self._timeout_s):
            _logger.error("%s: a save did not finish within %g s", self._run.url, self._timeout_s)
        if self._log is not None:
            self._log.close()
        self._decider.close()
        self._world.close()
