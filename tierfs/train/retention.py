"""`Retention`: removes this run's checkpoints, and local copies of them, that no policy keeps.

`tierfs.checkpoint.retention` has the policies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierfs.checkpoint.notes import Lines
from tierfs.checkpoint.retention import Decision, SavedCheckpoint, check_policies, decide
from tierfs.errors import InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.store import evict
from tierfs.train.policies import Context, listed
from tierfs.train.run import RunDirectory

KNOWN_MAX = 1000
"""The most checkpoints that a save's record lists: each one takes about 100 bytes in every record."""
OBJECT = "object"
LOCAL_TIERS = ("nvme", "ram")
_logger = logging.getLogger("tierfs.train")


class Retention:
    """Keeps track of a run's checkpoints, and removes those that no policy keeps.

    It knows the steps that this run saved, and those in the record of the checkpoint that it was restored from. Each
    save records the known steps. So it never touches the checkpoints of another run in the same root.

    Args:
        run: The directory of the run.
        keep: Policies for the object tier, or a dict of policies by tier. Without policies, everything stays.
        removes: Whether this process removes checkpoints. One rank of the job does.
        evicts: Whether this process drops local copies. One rank of each host does.

    Raises:
        InvalidInputError: A policy or tier is invalid.
    """

    def __init__(
        self, run: RunDirectory, keep: Iterable[Any] | Mapping[str, Iterable[Any]], *, removes: bool, evicts: bool
    ) -> None:
        by_tier = keep if isinstance(keep, Mapping) else {OBJECT: keep}
        if unknown := set(by_tier) - {OBJECT, *LOCAL_TIERS}:
            raise InvalidInputError(f"keep={{{min(unknown)!r}: ...}}: the tiers are 'object', 'nvme' and 'ram'")
        self._policies = {tier: listed(policies, "keep") for tier, policies in by_tier.items()}
        for policies in self._policies.values():
            check_policies(policies)
        self._run = run
        self._removes = removes
        self._evicts = evicts
        self._lock = threading.Lock()
        self._known: dict[int, SavedCheckpoint] = {}
        self._durable: set[int] = set()  # at the highest level, which they never lose
        self._evicted: dict[str, set[int]] = {tier: set() for tier in LOCAL_TIERS}
        self._protected: set[int] = set()
        self._lines, self._newer = Lines(), set[int]()

    def told(self) -> tuple[Mapping[str, Any], ...]:
        """Return the checkpoints that were noted last, at most `KNOWN_MAX`, for the record of a save."""
        with self._lock:
            return tuple(
                {name: getattr(each, name) for name in ("step", "created_ns", "metrics", "kind", "is_left")}
                for each in list(self._known.values())[-KNOWN_MAX:]
            )

    def resume(self, step: int, kind: str, lines: Lines | None, newer: Iterable[int]) -> None:
        """Protect a restored checkpoint, and learn the known checkpoints from its record.

        No policy keeps ``newer`` steps that the run left behind.
        """
        record = self._run.record_of(step) or {}
        try:
            for each in record.get("known", ()):
                facts = int(each["created_ns"]), dict(each["metrics"])
                self.add(int(each["step"]), str(each.get("kind", "full")), *facts, is_left=bool(each.get("is_left")))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            _logger.warning("%s: its record of earlier checkpoints cannot be read: %s", self._run.url_of(step), error)
        self.add(step, kind, self._run.standing(step).created_ns, self._run.metrics_of(step))
        self._protected = {step}
        self._lines, self._newer = lines or Lines(), set(newer)

    def add(
        self, step: int, kind: str, created_ns: int, metrics: Mapping[str, float], *, is_left: bool = False
    ) -> None:
        """Note a checkpoint that this run saved, and whether the run left it behind."""
        with self._lock:
            self._durable.discard(step)
            self._known[step] = SavedCheckpoint(
                f"step_{step}", step, created_ns, Level.STAGED, metrics=metrics, kind=kind, is_left=is_left
            )

    def forget(self, step: int) -> None:
        """Note that a checkpoint was removed."""
        with self._lock:
            self._known.pop(step, None)
            self._durable.discard(step)

    def apply(self, context: Context) -> list[int]:
        """Remove the checkpoints and drop the local copies that no policy keeps. Return the removed steps.

        Raises:
            Exception: A user's policy raised, or returned an invalid answer.
            StoreError, ReadOnlyError: The object tier failed.
        """
        if not any(self._policies.values()) or not (self._removes or self._evicts):
            return []
        saved = self._looked_at()
        if self._evicts:
            for tier in LOCAL_TIERS:
                if policies := self._policies.get(tier):
                    self._drop_copies(tier, self._decided(saved, policies, context))
        policies = self._policies.get(OBJECT)
        if not policies or not self._removes:
            return []
        removed = []
        for decision in self._decided(saved, policies, context):
            step = decision.saved.step
            assert step is not None, "every checkpoint of a run has a step"
            if decision.is_kept:
                _logger.debug("%s is kept: %s", self._run.url_of(step), ", ".join(decision.reasons))
            elif not self._run.is_pinned(step) and self._remove(step):
                removed.append(step)
        return removed

    def _looked_at(self) -> list[SavedCheckpoint]:
        """Return the known checkpoints with their present level. Durable ones are not looked up again."""
        for step in sorted(self._newer):
            newer = self._run.standing(step)
            is_left = newer.line is not None and self._lines.left(newer.line, step)
            if newer.line is not None and (is_left or self._lines.holds(newer.line, step)):
                self.add(step, newer.kind or "full", newer.created_ns, self._run.metrics_of(step), is_left=is_left)
            self._newer.discard(step)
        with self._lock:
            known = dict(self._known)
        found = []
        for step, each in known.items():
            level = Level.OBJECT
            is_complete = True
            if step not in self._durable:
                standing = self._run.standing(step)
                level = standing.level or Level.NONE
                is_complete = standing.state == "complete" and not standing.waiting and not self._run.damage_of(step)
                if is_complete and level is Level.OBJECT:
                    self._durable.add(step)
            found.append(replace(each, level=level, is_complete=is_complete, is_pinned=step in self._protected))
        return found

    def _remove(self, step: int) -> bool:
        try:
            self._run.remove(step)
        except NotFoundError:
            self.forget(step)  # another process removed it first
            return False
        except TierfsError as error:
            if isinstance(error, StoreError) and error.transient:
                raise  # the removal of other steps would fail, too
            _logger.warning("%s could not be removed: %s", self._run.url_of(step), error)
            return False
        self.forget(step)
        _logger.info("%s is removed: no policy keeps it", self._run.url_of(step))
        return True

    @staticmethod
    def _decided(saved: Sequence[SavedCheckpoint], policies: Sequence[Any], context: Context) -> list[Decision]:
        """Ask the policies which checkpoints to keep.

        A `TierfsError` of a policy is raised as a `RuntimeError`, because it is not a failure of the store.
        """
        try:
            return decide(saved, policies, int(context.now_s * 1e9), context)
        except TierfsError as error:
            raise RuntimeError(f"a keep policy failed: {error}") from error

    def _drop_copies(self, tier: str, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            step = decision.saved.step
            # The local copy of a checkpoint that is not in the object tier yet is the only one.
            if decision.is_kept or step is None or step not in self._durable or step in self._evicted[tier]:
                continue
            try:
                count = evict(*self._run.path_of(step), tier)
            except (InvalidInputError, NotFoundError) as error:
                _logger.debug("%s: no copies are dropped from %s: %s", self._run.url_of(step), tier, error)
                continue
            self._evicted[tier].add(step)
            _logger.info(
                "%s: %d bytes are dropped from %s: no policy keeps it there", self._run.url_of(step), count, tier
            )
