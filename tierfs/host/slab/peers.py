"""The segments of other processes in the host's folders."""

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

# The kernel's clock for a folder's timestamp may stand still for some milliseconds: a second change within that time
# does not move the timestamp.
SETTLED_NS = 50_000_000
# Resources that the system lacks for now, for this process or for all, until a process releases some.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_logger = logging.getLogger("tierfs.local")


class PeerSegments:
    """The segments of one store that other processes write. Thread-safe.

    ``own`` returns the segments of this process. A segment whose file is gone is not closed, because a thread
    may be reading it. It closes when the last reference is gone.

    Attributes:
        unread: Names of segments that could not be opened at the last look, for lack of descriptors or memory.
            Their content is unknown. Each look tries again.
        why_unread: The error of the last of these.
        damaged: The error for each file that is named like a segment of the store and is not one, by name. Its content
            is lost, except to a process that has it open.
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
        self._removed: dict[str, Segment] = {}  # by id: their files were removed while they held dirty data
        self._passed_over: dict[tuple[str, int], Exception] = {}
        self._seen_ns: list[int] = []

    def segments(self) -> list[Segment]:
        """Return all of them. Lists the folders if one changed."""
        with self._lock:
            self._look()
            # A segment of this process may have been found before the process added it to its own.
            ids = {segment.id for segment in self._own()}
            return [segment for segment in (*self._files.values(), *self._removed.values()) if segment.id not in ids]

    def drop(self, segment: Segment) -> None:
        """Remove a segment whose owner is dead. Its memory is released with the last slot or view of it."""
        segment.unlink()
        with self._lock:
            self._files.pop(segment.path.name, None)
            self._removed.pop(segment.id, None)

    def close(self) -> None:
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
            # An orderly removal happens only when nothing is dirty. After any other, only open descriptors keep the
            # dirty data.
            if name not in own and segment.is_dirty():
                self._removed.setdefault(segment.id, segment)
        new = [path for name, path in sorted(names.items()) if name not in self._files]
        self.unread = frozenset(path.name for path in new if not self._attach(path))
        self.damaged = {
            name: error for (name, _), error in self._passed_over.items() if name in names and name not in self._files
        }
        self._seen_ns = stamps if now_ns - max(stamps) > SETTLED_NS else []

    def _attach(self, path: Path) -> bool:
        """Open a segment. Return False if that must be tried again."""
        key = path.name, 0
        try:
            key = path.name, path.stat().st_ino
            if key in self._passed_over:
                return True
            segment = Segment.attach(path)
        except FileNotFoundError:
            return True
        except OldSegmentError:
            path.unlink(missing_ok=True)  # no process uses it since that boot, and on a disk it would stay
            return True
        except (TierfsError, OSError, MemoryError) as error:
            if not _is_for_now(error):
                _logger.warning("a segment cannot be used and is ignored: %s", error)
                self._passed_over[key] = error
                return True
            if path.name not in self.unread:
                _logger.warning("%s cannot be opened now, and is retried: %s", path, str(error) or "out of memory")
            self.why_unread = error
            return False
        if segment.store == self._store:
            self._files[path.name] = segment
        return True


def _is_for_now(error: BaseException) -> bool:
    cause = error.__cause__ if isinstance(error, TierfsError) and error.__cause__ is not None else error
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _SHORT)
