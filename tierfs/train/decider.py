"""`SaveDecider`: all ranks decide together, at the same step, whether to save and whether training ends.

`StepTimer` measures training steps and the cost of saves.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tierfs.train.agree import Agreed, Agreement, World
from tierfs.train.handle import Health
from tierfs.train.policies import Context, Preemption, SavePolicy
from tierfs.train.save import SaveThread
from tierfs.train.signals import Signals

_logger = logging.getLogger("tierfs.train")
LIGHT, FULL = 1, 2
"""The kinds of saves. If ranks ask for both, they make the full one."""
RESERVED = 0.2
"""The share of the grace period that is left for saves in flight if a late rank prevents the last save."""
DEADLINE_GRACE_S = 120.0
"""Seconds that the last save may take if no `Preemption` policy says how long."""
STEPS_MEASURED = 16


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

    def __repr__(self) -> str:
        return f"SaveDecider({self._signals!r}, {self._at_steps!r})"

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

    def _give_up_late(self, late: Callable[[], str]) -> None:
        """End the process if a rank is late and the grace period after a signal is almost over.

        The interpreter could not end by itself: the collective that waits for the late rank would stop it.
        """
        if self._signals.received and self.left_s <= self._grace_s * RESERVED:
            name = signal.Signals(self._signals.received).name
            _logger.error(
                "training ends without a last save: %s did not come to this step within %g s of %s",
                late(), self._grace_s * (1 - RESERVED), name,
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
