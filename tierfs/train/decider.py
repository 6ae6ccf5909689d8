"""`SaveDecider`: all ranks decide together, at the same step, whether to save and whether training ends.

`StepTimer` measures training steps and the cost of saves. `Signals` notes signals that announce the end of this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.threads import start_daemon
from tierfs.train.agree import Agreed, Agreement, World
from tierfs.train.handle import Health
from tierfs.train.policies import Context, Preemption, SavePolicy
from tierfs.train.save import SaveThread

_logger = logging.getLogger("tierfs.train")
LIGHT, FULL = 1, 2
"""The kinds of saves. If ranks ask for both, they make the full one."""
RESERVED = 0.2
"""The share of the grace period that is left for saves in flight if a late rank prevents the last save."""
DEADLINE_GRACE_S = 120.0
"""Seconds that the last save may take if no `Preemption` policy says how long."""
STEPS_MEASURED = 16


class Signals:
    """Handles signals until `close`, and also calls the previous handlers.

    Python lets only the main thread set handlers. On another thread, this logs a warning and handles nothing.

    Raises:
        InvalidInputError: A signal is invalid or cannot be handled, such as SIGKILL. No handler is set then.

    Attributes:
        received: The number of the first signal that arrived; 0 for none.
        received_s: The time of its arrival by `time.monotonic`, in seconds.
        is_terminated: Whether SIGTERM arrived, first or later.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self.received = 0
        self.received_s = 0.0
        self.is_terminated = False
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._is_closed = False
        numbers = sorted(set(wanted))
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in numbers)
            _logger.warning("%s are not handled: the manager was not made on the main thread", names)
            return
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            self.close()
            raise InvalidInputError(f"signal {int(number)} cannot be handled: {error}") from error
        multiprocessing.util.register_after_fork(self, Signals._protect_worker)

    def close(self) -> None:
        """Restore the previous handlers, except where other code has set a handler since.

        That code may call this handler, or restore it. From now on it only passes signals on. Python lets no other
        thread than the main one restore handlers.
        """
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._handle:
                # A handler that C code set reads as None, and Python cannot restore it.
                signal.signal(number, signal.SIG_DFL if before is None else before)
                del self._before[number]

    @property
    def _notes(self) -> bool:
        # A forked child inherits the handler, and nothing in it asks for the signal.
        return not self._is_closed and os.getpid() == self._pid

    def _protect_worker(self) -> None:
        """Let this process outlive the signals if it is a worker of a data loader. Called after a fork."""
        # torch starts its workers and those of torchdata with functions of this name. Nothing public tells a worker.
        target = getattr(multiprocessing.current_process(), "_target", None)
        if not self._is_closed and getattr(target, "__name__", "") == "_worker_loop":
            outlive_signals(numbers=self._before.keys())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._notes:
            self.is_terminated |= number == signal.SIGTERM
            if not self.received:
                self.received_s = time.monotonic()
                self.received = number
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before is not signal.SIG_IGN and not _is_taken(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def outlive_signals(_worker_id: int = 0, *, numbers: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
    """Let this process outlive signals to its process group. A ``worker_init_fn`` for workers that are no forks.

    SIGTERM from its parent still ends the process: so it is ended at the end of its parent.

    Args:
        _worker_id: Not used: torch passes it.
        numbers: The signals. The programs that this process starts do not get them, either.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def answer() -> None:
        parent = os.getppid()
        while True:
            found = signal.sigwaitinfo(numbers)
            if found.si_signo == signal.SIGTERM and found.si_pid == parent:
                os._exit(0)

    start_daemon(answer, name="worker-signals")


def _is_taken(number: int) -> bool:
    """Return whether a signal has a handler other than that of a closed or inherited `Signals`."""
    called = getattr(signal.getsignal(number), "__self__", None)
    return not isinstance(called, Signals) or called._notes


class SaveDecider:
    """Asks the policies of this rank, and lets the ranks agree. Handles the signals of `Preemption` until `close`."""

    def __init__(
        self, world: World, health: Health, full: Sequence[SavePolicy], light: Sequence[SavePolicy], saves: SaveThread
    ) -> None:
        self._world = world
        self._health = health
        self._policies = {FULL: full, LIGHT: light}
        self._saves = saves
        saves.context = self.context
        self._steps_saved: list[int] = []
        self._at_steps, self._at_checks = Agreement(world, 0), Agreement(world, 1)
        self.timer, self._check_timer = StepTimer(), StepTimer()
        preemptions = [policy for policy in self._policies[FULL] if isinstance(policy, Preemption)]
        self._grace_s = min((policy.grace_s for policy in preemptions), default=DEADLINE_GRACE_S)
        self._signals = Signals(number for policy in preemptions for number in policy.signals)
        world.while_waiting = self._give_up_late

    @contextmanager
    def at_step(self, step: int) -> Iterator[Agreed]:
        """Yield the decision of the ranks, and send this rank's opinion to the others afterwards. A collective.

        The caller saves and stops inside the context. That time does not count as part of a step.
        """
        self.timer.made_step()
        uniform = self.wish(step, uniform=True)
        agreed = self._opinion(step) if self._world.size == 1 else self._at_steps.receive()
        yield replace(agreed, wish=max(agreed.wish, uniform))
        if self._world.size > 1:
            # A save costs more than an agreement, and every rank knows of a uniform save by itself.
            self._at_steps.send(step, lambda: self._opinion(step), self.timer.step_s, now=bool(uniform))
        self.timer.go_on()

    @contextmanager
    def at_check(self, step: int) -> Iterator[Agreed]:
        """Do the same between steps, where the caller acts only on ``stop``. A collective.

        ``step`` is the last step that was made.
        """
        self._check_timer.made_step()
        agreed = self._opinion(step) if self._world.size == 1 else self._at_checks.receive()
        yield agreed
        if not agreed.stop and self._world.size > 1:
            self._at_checks.send(step, lambda: self._opinion(step), self._check_timer.step_s)
        self._check_timer.go_on()

    def wish(self, step: int, *, uniform: bool | None = None) -> int:
        """Return the kind of save that this rank's policies ask for; 0 for none.

        ``uniform=True`` asks only policies that answer the same on all ranks, ``False`` only the others.
        """
        context = self.context()
        for kind in (FULL, LIGHT):
            for policy in self._policies[kind]:
                if uniform is not None and getattr(policy, "is_uniform", False) is not uniform:
                    continue
                if policy.should_save(step, self._steps_saved, context=context):
                    return kind
        return 0

    def context(self) -> Context:
        timer = self.timer
        return Context(
            now_s=time.time(),
            since_s=timer.since_s,
            step_s=timer.step_s,
            blocked_s=timer.blocked_s,
            save_s=self._saves.save_s,
            agree_every=self._at_steps.every + (self._world.size > 1),
            is_saving=self._saves.is_saving,
            is_preempted=self._signals.received != 0,
            lost_share=min([1.0, *(getattr(policy, "lost_share", 1.0) for policy in self._policies[FULL])]),
        )

    def made_save(self, step: int, blocked_s: float) -> None:
        """Record a requested save, and the seconds for which it blocked training."""
        self.timer.made_save(blocked_s)
        if not self._steps_saved or step > self._steps_saved[-1]:
            self._steps_saved.append(step)

    @property
    def left_s(self) -> float:
        """Seconds that the last save may still take before this process is killed.

        They count from the signal. Without a signal on this rank, the whole grace period is left.
        """
        begun_s = self._signals.received_s or time.monotonic()
        return max(0.0, begun_s + self._grace_s - time.monotonic())

    def _give_up_late(self, why: Callable[[], str]) -> None:
        """End the process if the grace period after a signal is almost over while this rank waits.

        The interpreter could not end by itself: a collective that waits for a late rank would stop it.
        """
        if self._signals.received and self.left_s <= self._grace_s * RESERVED:
            name = signal.Signals(self._signals.received).name
            _logger.error(
                "training ends without a last save: %s within %g s of %s",
                why(), self._grace_s * (1 - RESERVED), name,
            )  # fmt: skip
            self._saves.wait(self.left_s)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + (signal.SIGTERM if self.is_terminated else self._signals.received))

    @property
    def is_terminated(self) -> bool:
        """Whether this rank got SIGTERM."""
        return self._signals.is_terminated

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._signals.close()

    def _opinion(self, step: int) -> Agreed:
        context = self.context()
        stops = [getattr(policy, "should_stop", None) for policies in self._policies.values() for policy in policies]
        return Agreed(
            signal=self._signals.received,
            wish=self.wish(step, uniform=False),
            stop=any(stop(step, self._steps_saved, context=context) for stop in stops if stop is not None),
            failures=self._health.in_a_row,
            is_old=self._world.is_first and self._health.is_old(),
        )


class StepTimer:
    """Measures steps without the saves between them.

    Attributes:
        step_s: Mean seconds of the last steps; 0 before the second step.
        blocked_s: Seconds for which a save blocks training; 0 before the first save.
    """

    def __init__(self) -> None:
        self._resumed_s = self._saved_s = time.perf_counter()
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._has_stepped = False
        self.step_s = self.blocked_s = 0.0

    def made_step(self) -> None:
        """Record the end of a step."""
        if self._has_stepped:  # more than a step lies before the first call
            self._steps.append(time.perf_counter() - self._resumed_s)
            self.step_s = sum(self._steps) / len(self._steps)
        self._has_stepped = True

    def go_on(self) -> None:
        """Record the start of the next step."""
        self._resumed_s = time.perf_counter()

    def made_save(self, blocked_s: float) -> None:
        """Record a save, and the seconds for which it blocked training."""
        self._saved_s = time.perf_counter()
        # The last save counts for one half, because the first save of a process costs more than later ones.
        self.blocked_s = blocked_s if not self.blocked_s else (self.blocked_s + blocked_s) / 2

    @property
    def since_s(self) -> float:
        """Seconds since the last save was requested, or since this timer began."""
        return time.perf_counter() - self._saved_s
