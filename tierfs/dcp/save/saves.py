"""A save, from when a writer is asked for it until that writer knows its end.

DCP tells a writer of a save in calls that do not say which one it is, and of a failure nothing at all. So a save belongs to what
was staged for it, and runs on the thread that reads that, or in a process that this thread waits for. Its end a writer knows from
`TierWriter.finish` where that runs, and elsewhere from the metadata that DCP hands to every rank, and back from another
process: whoever unpickles those hears of it.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from tierfs._fork import PerProcess
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import metadata_file
from tierfs.errors import NotFoundError
from tierfs.format.checkpoint import SaveMark

__all__ = [
    "Save",
    "SavedMeta",
    "Saver",
    "Saves",
    "StagedForSave",
    "ThreadSave",
    "claim",
    "others_wait",
    "read_here",
    "reduce_writer",
]


class Saver(Protocol):
    """The owner of saves, which hears how they go on."""

    def handed_over(self) -> Save:
        """A save that goes to another process, and was not staged here."""

    def ended(self, save: Save, url: str | None = None) -> None:
        """Take note that a save has come to its end, and its metadata is published or announced.

        Args:
            save: Which; with its mark and its metadata's path.
            url: Where it went, if another process made it.
        """


@dataclass(eq=False)
class Save:
    """One save of one writer on one rank.

    Attributes:
        writer: Whose it is.
        before: The ids of the saves that the writer has come to the end of.
        address: Where it goes; ``None`` until it begins.
        metadata_path: Path of the checkpoint's metadata; empty until this rank's part is there.
        mark: Which save it is; ``None`` until it has come to its end.
        token: Its name in the process that hands it over, there and where it runs; else empty.
        is_foreign: Whether somebody else staged it, and another process makes it.
        asked_on: The thread that asked for it.
        failure: The reason why its state was not staged, to be raised when it is planned.
    """

    writer: weakref.ref[Saver]
    before: AbstractSet[str] = frozenset()
    address: Address | None = None
    metadata_path: str = ""
    mark: SaveMark | None = None
    token: str = ""
    is_foreign: bool = False
    asked_on: int = field(default_factory=threading.get_ident)
    failure: Exception | None = None

    def end(self, metadata_path: str, mark: SaveMark, url: str | None = None) -> None:
        """Have the writer take note: see `Saver.ended`."""
        self.metadata_path, self.mark = metadata_path, mark
        if (writer := self.writer()) is not None:
            writer.ended(self, url)


class StagedForSave(Protocol):
    """The staged state of a save.

    Attributes:
        save: For which save, until that begins.
    """

    save: Save | None


class _Thread(threading.local):
    staged: weakref.ref[Any] | None = None  # what this thread read last, to save it
    save: Save | None = None  # which one runs on it, or is to


_thread = _Thread()
_sent: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()
_lock = PerProcess(threading.Lock)


def read_here(staged: StagedForSave | None) -> None:
    """Note that this thread reads what was staged: a save that begins on it next is the one that it was staged for."""
    _thread.staged = weakref.ref(staged) if staged is not None else None
    # Where it was staged somebody may only look at it. Elsewhere it is saved: if that fails, what was staged may be kept by the
    # error, and the thread ends.
    if staged is not None and staged.save is not None and staged.save.asked_on != threading.get_ident():
        _thread.save = _taken(staged)


def claim(writer: Saver) -> Save | None:
    """The writer's save that what this thread read was staged for, unless it has begun already."""
    staged: StagedForSave | None = _thread.staged() if _thread.staged is not None else None
    save = _thread.save if staged is None or staged.save is None else _taken(staged)
    _thread.staged = None
    if save is None or save.address is not None or save.token or save.writer() is not writer:
        return None
    return save


def _taken(staged: StagedForSave) -> Save | None:
    with _lock():
        save, staged.save = staged.save, None
    return save


class Saves:
    """The saves of one writer on one rank: those that are under way, and the last ones. Safe for use by many threads.

    Args:
        writer: Whose they are. Not kept alive.
        here: The writer's.

    Attributes:
        last: Which was asked for last, if any was.
        done: Which came to its end last, if any did.
    """

    def __init__(self, writer: Saver, here: ThreadSave) -> None:
        self._writer = weakref.ref(writer)
        self._here = here
        self._ended: set[str] = set()  # ids
        self.last: Save | None = None
        self.done: Save | None = None

    def __repr__(self) -> str:
        return f"Saves({len(self._ended)} ended)"

    def ask(self) -> Save:
        """One that is asked for now."""
        self._here.save = _thread.save = None  # what this thread saved before has failed, if it has not come to its end
        save = self.last = Save(self._writer, self._ended)
        return save

    def begin(self, save: Save | None) -> Save:
        """Have one run on this thread, by default one that is asked for now."""
        save = self._here.save = _thread.save = save or self.ask()
        return save

    def go_on(self) -> Save:
        """The one that runs on this thread, on which a planner may have asked for the level of another."""
        save = self._here.save
        assert save is not None, "set_up_storage_writer comes first"
        if save.mark is None:
            _thread.save = save
        return save

    def hand_over(self) -> Save:
        """One that another process makes, and was not staged here: it is asked for now, if DCP hands it over."""
        save = Save(self._writer, self._ended, is_foreign=True)
        if threading.current_thread() is not threading.main_thread():  # as DCP does it
            self.last = save
        return save

    def end(self, save: Save) -> None:
        """Note that one has come to its end: here, on the coordinator, or in the process that it was handed to."""
        self.done = save
        if save.mark is not None:
            self._ended.add(save.mark.save_id)
        if save.is_foreign and save.address is not None:
            self.last = save

    def settled(self, where: str) -> Save | None:
        """Which was asked for last; ``None`` where none was. One that was asked for before may be under way still.

        Args:
            where: The checkpoint's name in messages.

        Raises:
            NotFoundError: It has not come to its end.
        """
        save = self.last
        if save is not None and save.mark is None:
            raise NotFoundError(
                f"{where}: the save that began last has not come to its end here: `result()` of its future waits for that, and "
                "says why if it failed",
                path=where,
            )
        return save


def reduce_writer(writer: Saver) -> Any:
    """Reduce a writer that goes to another process, with what tells us which save it was when that is heard of."""
    save = _thread.save = claim(writer) or writer.handed_over()
    save.token = secrets.token_hex(16)
    with _lock():
        _sent[save.token] = save
    reduced: Any = writer.__reduce_ex__(2)
    make, arguments, state, *rest = reduced
    return make, arguments, {**state, "_token": save.token}, *rest


class ThreadSave(threading.local):
    """One writer's save on one thread: which one runs or ran last there, and the facts that it gets before it begins."""

    save: Save | None = None
    address: Address | None = None
    is_reset: bool = False
    is_coordinator: bool = True
    rank: int | None = None
    use_collectives: bool = True
    save_id: str = ""
    mark: SaveMark | None = None
    is_new: bool = False
    offered: Sequence[WriteItem] | None = None
    delegated: tuple[MetadataIndex, ...] = ()
    failure: Exception | None = None

    @property
    def rank_here(self) -> int:
        """This process's rank in the save."""
        if self.rank is not None:
            return self.rank
        return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0

    @property
    def metadata_name(self) -> str:
        """The name of the file with the metadata."""
        return metadata_file(None if self.use_collectives else self.rank_here)


def others_wait() -> bool:
    """Whether other ranks wait for this one to plan."""
    return dist.is_available() and dist.is_initialized() and bool(dist.get_world_size() > 1)


@dataclass
class SavedMeta(StorageMeta):  # type: ignore[misc]  # torch's classes are untyped here
    """Where a save went, and which one it was: torch's ``checkpoint_id`` and ``save_id``, and more.

    Attributes:
        metadata_path: Path of the checkpoint's metadata in its store.
        sequence: See `SaveMark`.
    """

    metadata_path: str = ""
    sequence: int = 0

    def __deepcopy__(self, _memo: object) -> SavedMeta:
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hear, (self.checkpoint_id, self.save_id, self.metadata_path, self.sequence)


def _hear(url: str, save_id: str, metadata_path: str, sequence: int) -> SavedMeta:
    """The coordinator's message to the other ranks, on the threads that save there."""
    save, mark = _thread.save, SaveMark(sequence, save_id)
    if (
        save is not None
        and save.mark is None
        and save.metadata_path == metadata_path
        and mark.save_id not in save.before
    ):
        save.end(metadata_path, mark)
    return SavedMeta(url, save_id, metadata_path=metadata_path, sequence=sequence)


def _send_back(meta: SavedMeta) -> tuple[Any, ...]:
    save = _thread.save
    if save is None or save.address is None or save.mark != SaveMark(meta.sequence, meta.save_id):
        return meta.__reduce__()
    return _hear_back, (save.token, save.address.url, meta.__reduce__()[1])


def _hear_back(token: str, url: str, said: tuple[str, str, str, int]) -> SavedMeta:
    """A process's message about the save that it was handed, on any thread."""
    meta = SavedMeta(said[0], said[1], metadata_path=said[2], sequence=said[3])
    with _lock():
        save = _sent.get(token)
    if save is not None:
        save.end(meta.metadata_path, SaveMark(meta.sequence, meta.save_id), url)
    return meta


ForkingPickler.register(SavedMeta, _send_back)
