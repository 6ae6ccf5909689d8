"""Memory without a file, handed over as descriptors: by who writes to the flusher, and by it to everybody else.

Where shared memory has no room for a segment it is memory that no name in the file system leads to. The flusher gets it
with the next message of the process that made it, which is what makes it outlive that process; others see in the
host's folder that it is there, and ask the flusher for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from tierfs.errors import NotFoundError, TierfsError
from tierfs.host.counters import Counters
from tierfs.host.rpc.caller import Caller
from tierfs.host.rpc.protocol import DESCRIPTORS_MAX, close_all
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment

__all__ = ["Handover", "copies_of", "note_of"]

SEGMENTS_S = 10.0


class Handover:
    """Gives the flusher this process's segments without a file, and gets those of others. For use by many threads.

    Args:
        ram: The ram tier.
        flusher: How to reach the flusher.
        counters: Where it is told of what could not be looked into.
    """

    def __init__(self, ram: RamTier, flusher: Caller, counters: Counters) -> None:
        self._ram = ram
        self._flusher = flusher
        self._counters = counters

    def __repr__(self) -> str:
        return f"Handover({self._ram!r})"

    def is_needed(self) -> bool:
        """Whether this process has segments that are safe from its end only once the flusher has them."""
        return bool(self._ram.nameless())

    def ask(self, do: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Ask the flusher for something that may concern slabs of this process. Raises as `Caller.request` does."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if ends is None else max(ends - time.monotonic(), 0.0)

        def give() -> None:
            # Ahead of it, so that a request that takes long keeps no memory that was given back meanwhile.
            copies = copies_of(self._ram.nameless())
            try:
                for at in range(0, len(copies), DESCRIPTORS_MAX):
                    self._flusher.request("draft", {}, fds=copies[at : at + DESCRIPTORS_MAX], timeout_s=left_s())
            finally:
                close_all(copies)

        give()
        return self._flusher.request(do, arguments, timeout_s=left_s(), again=give)

    def look_around(self) -> None:
        """Have the flusher hand over the segments of others that this process does not have yet, where there are any.

        Those that the flusher has not got itself are asked for again the next time: it may have them by then.

        Raises:
            StoreError, FormatError: It runs, and cannot be asked.
            NoAnswerError: It runs, and does not answer.
        """
        self._ram.let_go()
        unseen = sorted(self._ram.unseen())
        if not unseen or not self._flusher.is_running():
            return
        for at in range(0, len(unseen), DESCRIPTORS_MAX):
            names = {"names": unseen[at : at + DESCRIPTORS_MAX]}
            came = self._flusher.request_fds("segments", names, timeout_s=SEGMENTS_S)
            try:
                for descriptor in came:
                    self._look_into(descriptor)
            finally:
                close_all(came)

    def _look_into(self, descriptor: int) -> None:
        try:
            self._ram.add(Segment.attach_fd(descriptor))
        except (OSError, TierfsError) as error:
            self._counters.fall_back("hidden_segments", "a slab of another process cannot be looked into: %s", error)


def note_of(segment: Segment) -> str:
    """The name of the file that says of a segment without one that it is there."""
    return str(segment.header.name._replace(suffix="memfd"))


def copies_of(segments: Iterable[Segment]) -> list[int]:
    """Descriptors of segments, the caller's to close. One that is closed meanwhile is left out.

    A copy stays what it is while it is being sent. The segment's own may be closed, and its number be another file's.

    Raises:
        OSError: There are too many open files.
    """
    copies: list[int] = []
    try:
        for segment in segments:
            try:
                copies.append(os.dup(segment.fd))
            except NotFoundError:
                continue
            except OSError:
                if not segment.closed:
                    raise
                continue
            # Closed since: the number was perhaps not its own any more when it was copied.
            if segment.closed:
                os.close(copies.pop())
    except BaseException:
        close_all(copies)
        raise
    return copies
