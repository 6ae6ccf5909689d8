"""Plugs for training frameworks: one module a framework, imported only with it.

Each module saves through `tierfs.train` or `tierfs.dcp` with the hooks that its framework offers. This package imports
none of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierfs.checkpoint.retention import Best, SavedCheckpoint
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.host.pending.levels import Level

logger = logging.getLogger("tierfs.plugs")


def is_ours(path: Any) -> bool:
    return str(os.fspath(path)).startswith("tierfs:")


def checked_url(path: Any) -> str:
    """Return a tierfs URL as text. Raise `InvalidInputError` if it is something else."""
    if not is_ours(path):
        raise InvalidInputError(f"checkpoints of this plug go to tierfs URLs, not to {str(path)!r}: give 'tierfs::...'")
    return str(os.fspath(path))


def announce(what: str, url: str, ack: str | None) -> None:
    """Say once, at the start, where a plug saves, and at which level."""
    logger.warning("tierfs: %s go to %s; a save is done at %s", what, url, ack or "the configured level")


def say_loaded(url: str, step: int | None, level: str, saved_s: float, seconds: float) -> None:
    """Say in one line what a run goes on from. One rank calls it.

    Args:
        url: The URL of the checkpoint.
        step: Its step; ``None`` where the framework does not count steps.
        level: The level that it has reached.
        saved_s: The time of its save, in seconds since the epoch.
        seconds: The time that the load took.
    """
    what = url if step is None else f"step {step} from {url}"
    age = _span(time.time() - saved_s)
    logger.warning("tierfs: loaded %s: at the level %s, saved %s ago, in %.1f s", what, level, age, seconds)


def say_files_loaded(fs: Any, url: str, step: int | None, names: Sequence[str], begun_s: float) -> None:
    """Say the same of a checkpoint in these files, loaded since a monotonic time. If a look at them fails, say that."""
    seconds = time.monotonic() - begun_s
    try:
        level = min(Level.parse(fs.ack(name)) for name in names).label
        saved_s = max(fs.modified(name).timestamp() for name in names)
    except (TierfsError, OSError) as error:
        logger.warning("tierfs: loaded %s, and its level and age cannot be told: %s", url, error)
    else:
        say_loaded(url, step, level, saved_s, seconds)


def _span(seconds: float) -> str:
    """Return a time in its greatest unit of which there are two."""
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    size, name = next((each for each in units if seconds >= 2 * each[0]), (1, "seconds"))
    return f"{max(seconds, 0) / size:.0f} {name}"


@dataclass(frozen=True, slots=True)
class Total:
    """A keep policy: ``count`` checkpoints in all stay. The one that the run resumed from and the best one count.

    The newest one stays in any case.
    """

    count: int
    best: Best | None = None

    def preserve(self, checkpoints: Sequence[SavedCheckpoint], *, context: Any) -> list[bool]:
        """Return for each checkpoint, the oldest first, whether it stays."""
        kept = {each.path for each in checkpoints if each.is_pinned}
        kept |= {each.path for each in (self.best.select(checkpoints, 0) if self.best is not None else ())}
        for place, each in enumerate(reversed(checkpoints)):
            if place == 0 or len(kept) < self.count:
                kept.add(each.path)
        return [each.path in kept for each in checkpoints]

    def __str__(self) -> str:
        return f"one of {self.count} in all"
