"""The segments of other processes, as one process finds them: in the host's folder, or given to it as descriptors."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tierfs.errors import NotFoundError, TierfsError
from tierfs.host.slab.budget import MemfdNote, Shares
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import OldSegmentError

__all__ = ["Neighbours"]

# The kernel stamps a folder with a clock that may stand still for some milliseconds: a change that follows
# that soon upon another leaves no trace.
SETTLED_NS = 50_000_000
# What the operating system has none left of, to this process or to all, until somebody gives some back.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_logger = logging.getLogger("tierfs.local")


class Neighbours:
    """What others wrote. Safe for use by many threads.

    A segment that is gone is not closed, since a reader may be in it: it closes when nobody refers to it any more.

    Args:
        shares: The host's folder.
        store: Whose segments, 32 hex digits.
        own: Says which segments are this process's own.

    Attributes:
        wanted: Whether other processes wait for room, as of the last look.
        unseen: Names of the notes of this store's segments that have no file and were not given to us, as of then.
        unread: Names of those of its segments that could not be opened, for want of descriptors or memory: as of then, and at
            each look it is tried again. Nobody knows what is in them.
        why_unread: What came up with the last of these.
        damaged: What is wrong with each file that has the name of one of its segments and is none, by name. What was in it is
            lost as far as anybody can tell, but to a process that has it open.
    """

    def __init__(self, shares: Shares, store: str, own: Callable[[], Collection[Segment]]) -> None:
        self.wanted = False
        self.unseen: frozenset[str] = frozenset()
        self.unread: frozenset[str] = frozenset()
        self.why_unread: BaseException | None = None
        self.damaged: dict[str, Exception] = {}
        self._shares = shares
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self._files: dict[str, Segment] = {}
        self._given: dict[str, Segment] = {}
        self._notes: dict[str, MemfdNote] = {}
        self._passed_over: dict[tuple[str, int], Exception] = {}
        self._seen_ns = -1

    def __repr__(self) -> str:
        return f"Neighbours({len(self._files)} files, {len(self._given)} descriptors, wanted={self.wanted})"

    def segments(self) -> list[Segment]:
        """All of them. Looks into the folder if that changed."""
        with self._lock:
            self._look()
            # One of our own may have been found in the moment before it became our own.
            ids = {segment.id for segment in self._own()}
            return [segment for segment in (*self._files.values(), *self._given.values()) if segment.id not in ids]

    def given(self) -> list[Segment]:
        """Those without a file. Does not look into the folder."""
        with self._lock:
            return list(self._given.values())

    def is_wanted(self) -> bool:
        """Whether other processes wait for room."""
        with self._lock:
            self._look()
            return self.wanted

    def add(self, segment: Segment) -> bool:
        """Have one that came as a descriptor, under the host's lock. Returns whether it is of use, and was not known."""
        with self._lock:
            if segment.store != self._store or segment.id in self._notes:
                return False
            known = self._given.setdefault(segment.id, segment)
            self._seen_ns = -1
            self._notes[segment.id] = self._shares.note_memfd(segment.header)
            return known is segment

    def drop(self, segment: Segment) -> None:
        """Remove one; its owner is dead. Its memory goes when the last slot or view of it does."""
        segment.unlink()
        with self._lock:
            if segment.path is not None:
                self._files.pop(segment.path.name, None)
            self._given.pop(segment.id, None)
            note = self._notes.pop(segment.id, None)
        if note is not None:
            note.release()

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            segments = [*self._files.values(), *self._given.values()]
            notes = list(self._notes.values())
            for known in (self._files, self._given, self._notes):
                known.clear()
            self._seen_ns = -1
        for segment in segments:
            segment.close()
        for note in notes:
            note.release()

    def renew_in_child(self, parents: Iterable[Segment]) -> None:
        """After a fork: the parent's own segments are a neighbour's."""
        self._lock = threading.Lock()
        self._notes = {}  # the parent's locks on them are not ours to release
        self._given.update({segment.id: segment for segment in parents if segment.path is None})
        self._seen_ns = -1

    def _look(self) -> None:
        stamp, now_ns = self._stamp(), time.time_ns()
        if stamp == self._seen_ns and not self.unread:
            return
        own = {segment.path.name for segment in self._own() if segment.path is not None}
        found = [name for name in self._shares.names() if name.store == self._store[:8]]
        names = {str(name) for name in found if name.suffix == "slab"} - own
        held = [*self._given.values(), *(segment for segment in self._own() if segment.path is None)]
        seen = {str(segment.header.name._replace(suffix="memfd")) for segment in held}
        self.unseen = frozenset(str(name) for name in found if name.suffix == "memfd") - seen
        self.wanted = bool(self._shares.others_wanting())
        for name in [name for name in self._files if name not in names]:
            segment = self._files.pop(name)
            # Who removes one in good order does so when nothing is dirty in it; of any other, this is what is left.
            if name not in own and segment.is_dirty():
                segment.path = None
                self._given.setdefault(segment.id, segment)
        new = [name for name in sorted(names) if name not in self._files]
        self.unread = frozenset(name for name in new if not self._attach(self._shares.directory / name))
        self.damaged = {
            name: error
            for (name, _), error in self._passed_over.items()
            if name in names
            and name not in self._files
            and not isinstance(error, OldSegmentError)  # of which nothing is left
        }
        self._seen_ns = stamp if now_ns - stamp > SETTLED_NS else -1

    def _stamp(self) -> int:
        try:
            return os.stat(self._shares.directory).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _attach(self, path: Path) -> bool:
        """Look into a segment. Returns whether that is done with: false where it has to be tried again."""
        key = path.name, 0
        try:
            key = path.name, path.stat().st_ino
            if key in self._passed_over:
                return True
            segment = Segment.attach(path)
        except (FileNotFoundError, NotFoundError):
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
