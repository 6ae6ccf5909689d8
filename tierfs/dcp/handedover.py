"""What became of a save that another process made, as in DCP's process mode, where the writer that staged it hears of it.

DCP pickles the writer into the other process, and sends that save's metadata back to the thread that asked. So the metadata
says which save it was, and whoever unpickles it on that thread tells the writer.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import StorageMeta

from tierfs.format.checkpoint import SaveMark

__all__ = ["Hearer", "SavedMeta", "hand_over", "keep_here"]


class Hearer(Protocol):
    """Who hands a save over."""

    def heard(self, url: str, root: str, mark: SaveMark) -> None:
        """Take note of a save.

        Args:
            url: Of the checkpoint.
            root: Path of its metadata in the store.
            mark: Which save it is.
        """


@dataclass
class SavedMeta(StorageMeta):  # type: ignore[misc]  # torch's classes are untyped here
    """Where a save went, and which one it was: torch's ``checkpoint_id`` and ``save_id``, and more.

    Attributes:
        root: Path of the checkpoint's metadata in its store.
        sequence: See `SaveMark`.
    """

    root: str = ""
    sequence: int = 0

    def __deepcopy__(self, _memo: object) -> SavedMeta:
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hear, (self.checkpoint_id, self.save_id, self.root, self.sequence)


_thread = threading.local()


def hand_over(writer: Hearer) -> Any:
    """Reduce a writer that goes to another process, and note that this thread sent it: what comes back to it is for that one."""
    _thread.writer = weakref.ref(writer)
    return writer.__reduce_ex__(2)


def keep_here() -> None:
    """Note that this thread saves by itself: the metadata of other ranks is for no writer that it pickled before."""
    _thread.writer = None


def _hear(url: str, save_id: str, root: str, sequence: int) -> SavedMeta:
    known = getattr(_thread, "writer", None)
    writer: Hearer | None = known() if known is not None else None
    if writer is not None:
        writer.heard(url, root, SaveMark(sequence, save_id))
    return SavedMeta(url, save_id, root=root, sequence=sequence)
