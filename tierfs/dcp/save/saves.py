"""A save, from the request to a writer until that writer knows the outcome.

DCP calls a writer without saying which save a call belongs to, and reports no failures. So a save belongs to the state
that was staged for it. It runs on the thread that reads this state, or in a process that this thread waits for.

`TierWriter.finish` tells the writer of its own rank and process that the save finished. Other writers learn it from the
metadata, which DCP sends to every rank, and back from another process: unpickling that metadata informs the writer.
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
from tierfs.errors import NotFoundError
from tierfs.format.checkpoint import SaveMark, metadata_file


class Saver(Protocol):
    """The owner of saves. It is informed about their progress."""

    def handed_over(self) -> Save:
        """Return a save that goes to another process, and whose state was not staged here."""

    def ended(self, save: Save, url: str | None = None) -> None:
        """Record that a save finished, and that its metadata is published or announced.

        Args:
            save: The save, with its mark and its metadata's path.
            url: The URL of its directory, if another process made it.
        """


@dataclass(eq=False)
class Save:
    """One save of one writer on one rank.

    Attributes:
        writer: The writer.
        before: The ids of the writer's finished saves.
        address: The address that it goes to; ``None`` until it begins.
        metadata_path: The path of the checkpoint's metadata; empty until this rank's part is stored.
        mark: The mark of the save; ``None`` until it has finished.
        token: Its name in the process that hands it over and in the process where it runs; else empty.
        is_foreign: Whether its state was not staged here, and another process makes it.
        asked_on: The thread that requested it.
        failure: Why its state was not staged. Raised when the save is planned.
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
        """Mark the save as finished, and inform the writer: see `Saver.ended`."""
        self.metadata_path, self.mark = metadata_path, mark
        if (writer := self.writer()) is not None:
            writer.ended(self, url)


class StagedForSave(Protocol):
    """The staged state of a save.

    Attributes:
        save: The save that it was staged for; ``None`` once that has begun.
    """

    save: Save | None


class _Thread(threading.local):
    staged: weakref.ref[Any] | None = None  # the state that this thread read last, to save it
    save: Save | None = None  # the save that runs on this thread, or begins next


_thread = _Thread()
_sent: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()
_lock = PerProcess(threading.Lock)


def read_here(staged: StagedForSave | None) -> None:
    """Note that this thread reads a staged state: the save that begins next on this thread is the one of that state."""
    _thread.staged = weakref.ref(staged) if staged is not None else None
    # The thread that staged it may read it without saving it. Any other thread reads it to save it. If that fails, the
    # error may keep the staged state alive, and the thread ends.
    if staged is not None and staged.save is not None and staged.save.asked_on != threading.get_ident():
        _thread.save = _taken(staged)


def claim(writer: Saver) -> Save | None:
    """Return the writer's save that belongs to the state this thread read; ``None`` if it has begun already."""
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
    """The saves of one writer on one rank: those in flight, and the last ones. Safe for use by many threads.

    Args:
        writer: The writer. Not kept alive.
        here: The writer's `ThreadSave`.

    Attributes:
        last: The save that was requested last, if any.
        done: The save that finished last, if any.
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
        """Return a new save, requested now."""
        self._here.save = _thread.save = None  # an earlier save of this thread that has not finished has failed
        save = self.last = Save(self._writer, self._ended)
        return save

    def begin(self, save: Save | None) -> Save:
        """Begin a save on this thread; by default one that is requested now."""
        save = self._here.save = _thread.save = save or self.ask()
        return save

    def go_on(self) -> Save:
        """Return the save that runs on this thread, and make it current again.

        A planner may have asked for the level of another save on this thread.
        """
        save = self._here.save
        assert save is not None, "set_up_storage_writer comes first"
        if save.mark is None:
            _thread.save = save
        return save

    def hand_over(self) -> Save:
        """Return a save that another process makes, and whose state was not staged here.

        If DCP hands it over, it becomes the last requested save.
        """
        save = Save(self._writer, self._ended, is_foreign=True)
        if threading.current_thread() is not threading.main_thread():  # DCP hands saves over on another thread
            self.last = save
        return save

    def end(self, save: Save) -> None:
        """Record that a save finished: here, on the coordinator, or in the process that it was handed to."""
        self.done = save
        if save.mark is not None:
            self._ended.add(save.mark.save_id)
        if save.is_foreign and save.address is not None:
            self.last = save

    def settled(self, where: str) -> Save | None:
        """Return the save that was requested last; ``None`` if there was none. Earlier saves may still be in flight.

        Args:
            where: The checkpoint's name in messages.

        Raises:
            NotFoundError: That save has not finished.
        """
        save = self.last
        if save is not None and save.mark is None:
            raise NotFoundError(
                f"{where}: the last save has not finished in this process: `result()` of its future waits for it, and "
                "raises its error if it failed",
                path=where,
            )
        return save


def reduce_writer(writer: Saver) -> Any:
    """Reduce a writer that goes to another process, with a token that names its save when the answer comes back."""
    save = _thread.save = claim(writer) or writer.handed_over()
    save.token = secrets.token_hex(16)
    with _lock():
        _sent[save.token] = save
    reduced: Any = writer.__reduce_ex__(2)
    make, arguments, state, *rest = reduced
    return make, arguments, {**state, "_token": save.token}, *rest


class ThreadSave(threading.local):
    """One writer's save on one thread: the save that runs or last ran there, and facts given before it begins."""

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
    """Return whether other ranks wait for this one to plan."""
    return dist.is_available() and dist.is_initialized() and bool(dist.get_world_size() > 1)


@dataclass
class SavedMeta(StorageMeta):  # type: ignore[misc]  # torch's classes are untyped here
    """The address and mark of a finished save: torch's ``checkpoint_id`` and ``save_id``, and more.

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
    """Take the coordinator's message on another rank, on the thread that saves there."""
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
    """Take the message of another process about the save that it was handed, on any thread."""
    meta = SavedMeta(said[0], said[1], metadata_path=said[2], sequence=said[3])
    with _lock():
        save = _sent.get(token)
    if save is not None:
        save.end(meta.metadata_path, SaveMark(meta.sequence, meta.save_id), url)
    return meta


ForkingPickler.register(SavedMeta, _send_back)
