"""The logged steps of a run: files below `DIRECTORY` from which training makes the steps after a checkpoint again.

One file has what one rank logged of one step. Steps that follow each other without another full save are a *chain*,
which has a directory. A file's name says which step it follows, so that a listing shows how far the log goes.

Decision: docs/decisions/0071-a-log-of-gradients.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from tierfs.errors import NotFoundError
from tierfs.format.keys import inside
from tierfs.store import Store, delete, find

DIRECTORY = "replay"
"""The directory in a run's directory that holds its logged steps."""
_NAME = re.compile(r"([0-9a-f-]{1,80})/([0-9]{1,18})-([0-9]{1,18})\.rank-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One file of the log.

    Attributes:
        chain: The name of its chain. Names sort by the time at which their chains began.
        after: The step that it follows.
        step: The training step that it leads to.
        rank: The rank that logged it.
        ranks: The number of ranks that logged the step.
    """

    chain: str
    after: int
    step: int
    rank: int
    ranks: int

    def path(self, run: str) -> str:
        """Return the file's path, for the path of the run's directory; both relative to the store."""
        name = f"{self.after}-{self.step}.rank-{self.rank:05d}-of-{self.ranks:05d}.safetensors"
        return inside(inside(inside(run, DIRECTORY), self.chain), name)


def logged_steps(store: Store, run: str) -> list[LoggedStep]:
    """Return the files of a run's log that this host sees, in the order of their chains and steps. Reads no file.

    Raises:
        StoreError, ReadOnlyError: The object tier cannot be listed.
    """
    below = inside(run, DIRECTORY)
    return parse((entry.path for entry in find(store, below, detail=False) if not entry.is_directory), below)


def parse(paths: Iterable[str], below: str) -> list[LoggedStep]:
    """Return the files of a log among paths. ``below`` is the directory of the log."""
    matches = (_NAME.fullmatch(path[len(below) + 1 :]) for path in paths if path.startswith(f"{below}/"))
    found = (LoggedStep(match[1], *map(int, match.groups()[1:])) for match in matches if match is not None)
    return sorted(found, key=lambda one: (one.chain, one.after, one.rank))


def count_after(logged: Collection[LoggedStep], step: int | None) -> int:
    """Return how many files follow a checkpoint's step in the log without a gap, counting those of all ranks once."""
    ranks: dict[tuple[int, int, str], set[int]] = {}
    for one in logged:
        ranks.setdefault((one.after, one.step, one.chain), set()).add(one.rank)
    whole = {(one.after, one.step) for one in logged if len(ranks[one.after, one.step, one.chain]) == one.ranks}
    count = 0
    while nexts := [later for after, later in whole if step is not None and after == step < later]:
        step, count = min(nexts), count + 1
    return count


def remove_logged(store: Store, run: str, until: float) -> None:
    """Remove the files that lead to a step of a run, or to an earlier one. Raises as `delete` does."""
    for one in logged_steps(store, run):
        if one.step <= until:
            with suppress(NotFoundError):
                delete(store, one.path(run))
