"""The segments of other processes, as one process finds them in the host's folders."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tierfs.errors import TierfsError
from tierfs.host.slab.budget import RamBudget
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import OldSegmentError

__all__ = ["PeerSegments"]

# The kernel stamps a folder with a clock that may stand still for some milliseconds: a change that follows
# that soon upon another leaves no trace.
SETTLED_NS = 50_000_000
# What the operating system has none left of, to this process or to all, until somebody gives some back.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_logger = logging.getLogger("tierfs.local")


class PeerSegments:
    """What others wrote. Safe for use by many threads.

    A segment that is gone is not closed, since a reader may be in it: it closes when nobody refers to it any more.

    Args:
        ram_budget: The host's folders.
        store: Whose segments, 32 hex digits.
        own: Says which segments are this process's own.

    Attributes:
        unread: Names of those of its segments that could not be opened, for want of descriptors or memory: as of then, and at
            each look it is tried again. Nobody knows what is in them.
        why_unread: What came up with the last of these.
        damaged: What is wrong with each file that has the name of one of its segments and is none, by name. What was in it is
            lost as far as anybody can tell, but to a process that has it open.
    """

    def __init__(self, ram_budget: RamBudget, store: str, own: Callable[[], Collection[Segment]]) -> None:
        self.unread: frozenset[str] = frozenset()
        self.why_unread: BaseException | None = None
        self.damaged: dict[str, Exception] = {}
        self._ram_budget = ram_budget
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self._files: dict[str, Segment] = {}
        self._removed: dict[str, Segment] = {}  # by id: somebody removed their files while something in them was dirty
        self._passed_over: dict[tuple[str, int], Exception] = {}
        self._seen_ns: list[int] = []

    def __repr__(self) -> str:
        return f"PeerSegments({len(self._files)} segments)"

    def segments(self) -> list[Segment]:
        """All of them. Looks into the folder if that changed."""
        with self._lock:
            self._look()
            # One of our own may have been found in the moment before it became our own.
            ids = {segment.id for segment in self._own()}
            return [segment for segment in (*self._files.values(), *self._removed.values()) if segment.id not in ids]

    def drop(self, segment: Segment) -> None:
        """Remove one; its owner is dead. Its memory goes when the last slot or view of it does."""
        segment.unlink()
        with self._lock:
            self._files.pop(segment.path.name, None)
            self._removed.pop(segment.id, None)

    def close(self) -> None:
        """Release all."""
        with self._lock:
            segments = [*self._files.values(), *self._removed.values()]
            for known in (self._files, self._removed):
                known.clear()
            self._seen_ns = []
        for segment in segments:
            segment.close()

    def _look(self) -> None:
        stamps, now_ns = self._ram_budget.stamps(), time.time_ns()
        if stamps == self._seen_ns and not self.unread:
            return
        own = {segment.path.name for segment in self._own()}
        found = [(name, path) for name, path in self._ram_budget.paths() if name.store == self._store[:8]]
        names = {str(name): path for name, path in found if name.suffix == "slab" and str(name) not in own}
        self._removed = {ident: segment for ident, segment in self._removed.items() if segment.is_dirty()}
        for name in [name for name in self._files if name not in names]:
            segment = self._files.pop(name)
            # Who removes one in good order does so when nothing is dirty in it; of any other, this is what is left.
            if name not in own and segment.is_dirty():
                self._removed.setdefault(segment.id, segment)
        new = [path for name, path in sorted(names.items()) if name not in self._files]
        self.unread = frozenset(path.name for path in new if not self._attach(path))
        self.damaged = {
            name: error for (name, _), error in self._passed_over.items() if name in names and name not in self._files
        }
        self._seen_ns = stamps if now_ns - max(stamps) > SETTLED_NS else []

    def _attach(self, path: Path) -> bool:
        """Look into a segment. Returns whether that is done with: false where it has to be tried again."""
        key = path.name, 0
        try:
            key = path.name, path.stat().st_ino
            if key in self._passed_over:
                return True
            segment = Segment.attach(path)
        except FileNotFoundError:
            return True
        except OldSegmentError:
            path.unlink(missing_ok=True)  # nobody has it since, and on a disk it would stay
            return True
        except (TierfsError, OSError, MemoryError) as error:
            if not _is_for_now(error):
                _logger.warning("a segment is passed over: %s", error)
                self._passed_over[key] = error
                return True
            if path.name not in self.unread:
                _logger.warning(
                    "%s cannot be looked into now, and is tried again: %s", path, str(error) or "out of memory"
                )
            self.why_unread = error
            return False
        if segment.store == self._store:
            self._files[path.name] = segment
        return True


def _is_for_now(error: BaseException) -> bool:
    cause = error.__cause__ if isinstance(error, TierfsError) and error.__cause__ is not None else error
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _SHORT)
