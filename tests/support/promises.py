"""What was promised, and to whom: the model by which `soak` judges every answer."""

from __future__ import annotations

import functools

import xxhash

from support.killing import content

LEVELS = ("staged", "local", "peer", "object")


class BrokenPromiseError(Exception):
    """Something broke a promise.

    Args:
        kind: ``wrong bytes``, ``loss``, ``refused``, ``hang`` or ``error``.
        detail: What happened.
    """

    def __init__(self, kind, detail):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def digest_of(data):
    """Return what names a content in answers: its length and its digest."""
    return f"{len(data)}-{xxhash.xxh3_128_hexdigest(data)}"


@functools.lru_cache(4096)
def answer_of(value):
    """Return how a reader describes a value: a content, the number of a checkpoint, or None."""
    return digest_of(content(*value)) if isinstance(value, tuple) else value


class PathModel:
    """The changes that one writer has tried to make of one path, in order.

    Each has a set of possible values, because a copy of a file has any value that the file may have. *Floors* are the
    indexes of the newest changes that were acknowledged at each level. A change whose answer was lost may have
    happened or not, so a path has the value of its floor or of any later change.
    """

    def __init__(self):
        self.attempts = [frozenset([None])]
        self.floors = dict.fromkeys(LEVELS, 0)

    def begin(self, values):
        self.attempts.append(frozenset(values))
        return len(self.attempts) - 1

    def acknowledge(self, index, level):
        for each in LEVELS[: LEVELS.index(level) + 1]:
            self.floors[each] = max(self.floors[each], index)

    def lose(self, level):
        """All that had not reached ``level`` may be lost."""
        for each in LEVELS[: LEVELS.index(level)]:
            self.floors[each] = self.floors[level]

    def possible(self, floor):
        return frozenset().union(*self.attempts[floor:])

    def index_of(self, answer, floor):
        """Return the first change from ``floor`` on that an answer may be of, or None."""
        for index in range(floor, len(self.attempts)):
            if any(answer_of(value) == answer for value in self.attempts[index]):
                return index
        return None

    def settle(self, *, is_read):
        """Forget what is superseded, when all is in the object tier and no process works.

        If its host has just read the path, no change after the one that it saw has happened.
        """
        floor = self.floors["staged"]
        self.attempts = self.attempts[floor : floor + 1 if is_read else None]
        self.floors = dict.fromkeys(LEVELS, 0)


class Model:
    """All paths. Each directory has one writer, which works in turn."""

    def __init__(self):
        self.paths = {}

    def path(self, name):
        return self.paths.setdefault(name, PathModel())

    def below(self, directory):
        return {name: path for name, path in self.paths.items() if name.startswith(directory)}

    def lose(self, directory, level):
        for path in self.below(directory).values():
            path.lose(level)

    def check(self, name, answer, floor, who):
        """Check what a reader found, and return the change that it may be of.

        Raises:
            BrokenPromiseError: No change that is possible has this value.
        """
        path = self.path(name)
        if isinstance(answer, str) and answer.startswith("error: "):
            raise BrokenPromiseError("refused", f"{who} cannot read {name}: {answer}")
        index = path.index_of(answer, floor)
        if index is not None:
            return index
        older = path.index_of(answer, 0)
        if answer is None or older is not None:
            raise BrokenPromiseError(
                "loss", f"{who} reads {answer} at {name}, change {older} of {self._about(path, floor)}"
            )
        raise BrokenPromiseError("wrong bytes", f"{who} reads {answer} at {name}: {self._about(path, floor)}")

    @staticmethod
    def _about(path, floor):
        return f"{[sorted(map(str, one)) for one in path.attempts]}, floor {floor}, floors {path.floors}"
