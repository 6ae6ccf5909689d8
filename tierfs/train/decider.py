"""`SaveDecider`: all ranks decide together, at the same step, whether to save and whether training is to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tierfs.train.agree import Agreed, Agreement, World
from tierfs.train.health import Health
from tierfs.train.policies import Context, Preemption, SavePolicy
from tierfs.train.signals import Signals
from tierfs.train.timing import StepTimer

__all__ = ["FULL", "LIGHT", "SaveDecider"]

LIGHT, FULL = 1, 2
"""The kinds of saves, the greater of which is made where ranks want both."""
DEADLINE_GRACE_S = 120.0
"""How long the last save may take where no `Preemption` says it."""


class SaveDecider:
    """Asks the policies of this rank, and has the ranks agree. Handles the signals of `Preemption` until `close`.

    Args:
        world: The ranks.
        health: What failed saves came to.
        full: Policies of which any may ask for a save.
        light: Policies of which any may ask for a light save.
        is_saving: Returns whether a save is under way.

    Attributes:
        timer: How long steps and saves take.
    """

    def __init__(
        self,
        world: World,
        health: Health,
        full: Sequence[SavePolicy],
        light: Sequence[SavePolicy],
        is_saving: Callable[[], bool],
    ) -> None:
        self._world = world
        self._health = health
        self._policies = {FULL: full, LIGHT: light}
        self._is_saving = is_saving
        self._steps_saved: list[int] = []
        self._at_steps, self._at_checks = Agreement(world, 0), Agreement(world, 1)
        self.timer, self._check_timer = StepTimer(), StepTimer()
        preemptions = [policy for policy in self._policies[FULL] if isinstance(policy, Preemption)]
        self._grace_s = min((policy.grace_s for policy in preemptions), default=DEADLINE_GRACE_S)
        self._signals = Signals(number for policy in preemptions for number in policy.signals)

    def __repr__(self) -> str:
        return f"SaveDecider({self._signals!r}, {self._at_steps!r})"

    @contextmanager
    def at_step(self, step: int) -> Iterator[Agreed]:
        """Give what the ranks agreed on, to be done in the context, and tell the others this rank's opinion after it. A collective."""
        self.timer.made_step()
        uniform = self.wish(step, uniform=True)
        agreed = self._opinion(step) if self._world.size == 1 else self._at_steps.receive()
        yield replace(agreed, wish=max(agreed.wish, uniform))
        if self._world.size > 1:
            # A save costs more than agreeing does, and every rank knows of a uniform one without asking.
            self._at_steps.send(step, lambda: self._opinion(step), self.timer.step_s, now=bool(uniform))
        self.timer.go_on()

    @contextmanager
    def at_check(self, step: int) -> Iterator[Agreed]:
        """Do the same between steps, where only the end of training counts. A collective.

        Args:
            step: The last one.
        """
        self._check_timer.made_step()
        agreed = self._opinion(step) if self._world.size == 1 else self._at_checks.receive()
        yield agreed
        if not agreed.stop and self._world.size > 1:
            self._at_checks.send(step, lambda: self._opinion(step), self._check_timer.step_s)
        self._check_timer.go_on()

    def wish(self, step: int, *, uniform: bool | None = None) -> int:
        """Which kind of save this rank's policies ask for; 0 for none.

        Args:
            step: That was made.
            uniform: Ask only those whose answer is the same on all ranks, or only the others; ``None`` for all.
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
        """The facts that policies get."""
        timer = self.timer
        return Context(
            now_s=time.time(),
            since_s=timer.since_s,
            step_s=timer.step_s,
            blocked_s=timer.blocked_s,
            save_s=timer.save_s,
            agree_every=self._at_steps.every + (self._world.size > 1),
            is_saving=self._is_saving(),
            is_preempted=self._signals.received != 0,
        )

    def made_save(self, step: int, blocked_s: float) -> None:
        """Take note of a save that was asked for, and of how long training waited for it."""
        self.timer.made_save(blocked_s)
        if not self._steps_saved or step > self._steps_saved[-1]:
            self._steps_saved.append(step)

    @property
    def left_s(self) -> float:
        """How long the last save may still take: until whoever sent the signal ends this process."""
        begun_s = self._signals.received_s or time.monotonic()
        return max(0.0, begun_s + self._grace_s - time.monotonic())

    def close(self) -> None:
        """Set the signal handlers that were there before."""
        self._signals.close()

    def _opinion(self, step: int) -> Agreed:
        """This rank's contribution to an agreement."""
        context = self.context()
        stops = [getattr(policy, "should_stop", None) for policies in self._policies.values() for policy in policies]
        return Agreed(
            signal=self._signals.received,
            wish=self.wish(step, uniform=False),
            stop=any(stop(step, self._steps_saved, context=context) for stop in stops if stop is not None),
            failures=self._health.in_a_row,
            is_old=self._world.is_first and self._health.is_old(),
        )
