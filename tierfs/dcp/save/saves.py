"""A save, from the request to a writer until that writer knows the outcome; and the staged state that it saves.

DCP calls a writer without saying which save a call belongs to, and reports no failures. But it runs a save on one
thread, and reads the state there before it calls the writer. So reading a `StagedState` tells the thread its save.

`TierWriter.finish` notes on the coordinator that the save finished. The other ranks get no call after their part is
stored. They learn it from the metadata, which DCP sends to them: unpickling that metadata ends the save of the thread.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from tierfs._fork import PerProcess
from tierfs.dcp.address import Address
from tierfs.dcp.tensorbytes import holds_shards
from tierfs.device.tier import Spot
from tierfs.device.transfer import Transfer
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.format.checkpoint import SaveMark, metadata_file
from tierfs.gc_pause import LINGER_S, detached, planning

if TYPE_CHECKING:
    from tierfs.dcp.save.fill import Later
    from tierfs.dcp.save.state_plan import StatePlan

ALIGN_BYTES = 64


@dataclass(eq=False)
class Save:
    """One save of one writer on one rank. The writer's methods fill it in, in the order in which DCP calls them.

    Attributes:
        saves: The writer's saves.
        failure: Why its state was not staged. Raised when the save is planned.
        taken: Items that other ranks save, and that were not staged: see `Replicas.take`.
        address: The address that it goes to; ``None`` until it begins.
        rank: This process's rank in the save.
        use_collectives: Whether the ranks save together.
        is_coordinator: Whether this rank collects the plans and results of all ranks.
        save_id: The id that this rank proposed.
        offered: The items of this rank's plan; ``None`` if the planner said that nothing has changed.
        delegated: The items that this rank leaves to others.
        planned: On the coordinator, the mark that the save will have.
        is_new: On the coordinator, whether nothing was at the metadata's path when the save began.
        snapshots: Where its items lie in the device tier: see `DeviceTier.publish`.
        metadata_path: The path of the checkpoint's metadata; empty until this rank's part is stored.
        mark: The mark of the save; ``None`` until it has finished.
    """

    saves: weakref.ref[Saves]
    failure: Exception | None = None
    taken: Mapping[str, WriteItem] = field(default_factory=dict)
    address: Address | None = None
    rank: int = 0
    use_collectives: bool = True
    is_coordinator: bool = False
    save_id: str = ""
    offered: Sequence[WriteItem] | None = None
    delegated: tuple[MetadataIndex, ...] = ()
    planned: SaveMark | None = None
    is_new: bool = False
    snapshots: Sequence[tuple[Transfer, dict[Any, Spot]]] = ()
    metadata_path: str = ""
    mark: SaveMark | None = None

    @property
    def target(self) -> Address:
        """The address that it goes to. For a save that has begun."""
        assert self.address is not None
        return self.address

    @property
    def metadata_name(self) -> str:
        """The name of the file with the metadata."""
        return metadata_file(None if self.use_collectives else self.rank)

    def end(self, mark: SaveMark) -> None:
        """Record that the save finished, and that its metadata is published or announced."""
        self.mark = mark
        saves = self.saves()
        if saves is not None:
            saves.done = self
            saves.ended.add(mark.save_id)
        for transfer, items in self.snapshots:
            transfer.publish(mark.save_id, items)
        self.snapshots = ()


class Saves:
    """The saves of one writer on one rank. Safe for use by many threads.

    Attributes:
        begun: Set when the first save is requested.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.last: Save | None = None
        self.done: Save | None = None
        self.ended: set[str] = set()

    def __repr__(self) -> str:
        return f"Saves({len(self.ended)} ended)"

    def ask(self) -> Save:
        """Return a new save, requested now."""
        self.begun.set()
        save = self.last = Save(weakref.ref(self))
        return save

    def begin(self) -> Save:
        """Return the save of the state that this thread read last; a new save if that is not a state of this writer."""
        save, _thread.read = getattr(_thread, "read", None), None
        _thread.stored = None  # an earlier save of this thread that has not finished has failed
        return save if save is not None and save.saves() is self and save.address is None else self.ask()

    def settled(self, where: str) -> Save | None:
        """Return the save that was requested last; ``None`` if there was none. Earlier saves may still be in flight.

        Raises:
            NotFoundError: That save has not finished.
        """
        save = self.last
        if save is not None and save.mark is None:
            raise NotFoundError(
                f"{where}: the last save has not finished in this process: `result()` of its future waits for it, and "
                "raises its error if it failed; if another process saves (AsyncCheckpointerType.PROCESS), ask a new "
                "TierWriter of the checkpoint's URL",
                path=where,
            )
        return save


_thread = threading.local()
"""``read``: the save of the staged state that this thread read last. ``state``: that state, weakly. ``stored``: the save
whose part it stored last. ``own``: the `_Own` that this thread pickled last in a save."""


def forget_read() -> None:
    """Forget the staged state that this thread read: the state of the next save is read after this."""
    _thread.read = None


def plan_read(state_dict: Mapping[str, Any]) -> StatePlan | None:
    """Return the plan of a state dict, if it has the values of the staged state that this thread read last."""
    found: weakref.ref[StagedState] | None = getattr(_thread, "state", None)
    state = found() if found is not None else None
    if state is None or len(state) != len(state_dict):
        return None
    return state.plan if all(map(operator.is_, dict.values(state), state_dict.values())) else None


def note_stored(save: Save) -> None:
    """Note that this rank's part is stored: metadata that this thread receives from now on is that of the save."""
    _thread.stored = save


class _Own:
    """An object that the coordinator sends to itself. Its pickle only names it, for the thread that saves."""

    def __reduce__(self) -> tuple[Any, ...]:
        _thread.own = self
        return _take_own, (id(self),)


class OwnPlan(_Own, SavePlan):  # type: ignore[misc]  # torch's classes are untyped here
    """The coordinator's own plan."""


class OwnResults(_Own, list[WriteResult]):
    """The coordinator's own results."""


def _take_own(number: int) -> Any:
    own = getattr(_thread, "own", None)
    if id(own) != number:
        raise InvalidInputError("the pickle of a save's plan or metadata has no content: pickle a copy of its fields")
    return own


def broadcast_nothing(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Leave the metadata out of its next pickle, if DCP makes that for other ranks, and there are none."""

    def once(_protocol: object) -> tuple[Any, ...]:
        del vars(metadata)["__reduce_ex__"]
        return _take_own, (0,)

    if len(results) == 1 and getattr(_thread, "own", None) is results[0]:
        vars(metadata)["__reduce_ex__"] = once
    _thread.own = None


class StagedState(dict[str, Any]):
    """A staged state dict. For `pickle` and `copy` it is a dict.

    Its values are made when one of them is read first: by the thread that saves, while training goes on.

    Args:
        make: Makes the content from the staged tensors. These are contiguous, on the CPU, each with a storage of its
            own. They may be anywhere in it, and be the local parts of DTensors and ShardedTensors.
        keys: Of the content.
        save: The save that it was staged for, if any.
        plan: How it was staged, if a plan describes it.
        later: Has the staged tensors; ``None`` if nothing was staged.

    Attributes:
        file: The shard file that its tensors lie in; ``None`` if nothing was staged, and once another process has it.
    """

    def __init__(
        self,
        make: Callable[[Sequence[torch.Tensor]], dict[str, Any]],
        keys: Iterable[str],
        save: Save | None,
        later: Later | None,
        plan: StatePlan | None = None,
    ) -> None:
        super().__init__(dict.fromkeys(keys))
        self.save = save
        self.plan = plan
        self.file = later.file if later is not None else None
        self._views: Sequence[torch.Tensor] = ()
        self._later = later
        self._make: Callable[[Sequence[torch.Tensor]], dict[str, Any]] | None = make
        self._lock = PerProcess(threading.Lock)

    def wait(self) -> None:
        """Make the content, and wait for copies from a GPU.

        If one fails, the save fails when it is planned, so that every rank gets the error.
        """
        try:
            with self._lock():
                if self._make is not None:
                    with planning(LINGER_S):
                        self._views = self._later.result() if self._later is not None else ()
                        super().update(self._make(self._views))
                    self._make = self._later = None
            if self.file is not None:
                self.file.wait_filled()
        except Exception as error:
            if self.save is None or self.save.address is not None:
                raise
            self.save.failure = detached(error)

    def items(self) -> Any:
        """Return the items. DCP calls this first on the state that it saves, on the thread that saves it."""
        self.wait()
        if self.save is not None:
            _thread.read, _thread.state = self.save, weakref.ref(self)
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    __hash__ = None  # as of a dict

    def __iter__(self) -> Any:
        # Defined so that `dict(...)`, `copy` and `**` call `__getitem__` instead of reading the table directly.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()
        if self.save is not None and self.save.failure is not None:
            raise detached(self.save.failure)
        return dict, (dict(self),)

    def reduce_for_process(self) -> tuple[Any, ...]:
        """Reduce the state for another process, by a copy in one piece of shared memory.

        torch would send a file descriptor for each tensor. Afterwards the staged tensors are views of that copy, and
        their room in the ram tier is free.
        """
        self.wait()
        views, file = self._views, self.file
        if file is not None:
            file.check_is_held()  # a failure would not reach the other process
            file.check_arrived()
            if any(map(holds_shards, views)):
                raise InvalidInputError(
                    "a tensor that describes its shards of a larger tensor cannot go to another process: save it with "
                    "AsyncCheckpointerType.THREAD"
                )
            if file.store.tiers is not None:
                file.store.tiers.counters.say(
                    "process",
                    "another process saves the checkpoint, which needs a second copy of the state in shared memory: "
                    "AsyncCheckpointerType.THREAD, the default, needs none",
                )
            _move_to_shared(views)
            file.abort()
            self.file = None
        return self.__reduce__()


def _after_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of dict that makes the content first."""

    def call(state: StagedState, *arguments: Any) -> Any:
        state.wait()
        return method(state, *arguments)

    return call


for _name in ("values", "get", "__getitem__", "pop", "popitem", "setdefault", "__eq__", "__repr__"):
    setattr(StagedState, _name, _after_wait(getattr(dict, _name)))


def _move_to_shared(views: Sequence[torch.Tensor]) -> None:
    """Move tensors into one new piece of shared memory."""
    begins = []
    end = 0
    for view in views:
        begins.append(end)
        end += -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    shared = torch.UntypedStorage._new_shared(max(end, 1))
    for view, begin in zip(views, begins, strict=True):
        raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared, begin, (view.nbytes,))
        raw.copy_(view.reshape(-1).view(torch.uint8))
        view.set_(raw.view(view.dtype).view(view.shape))


# `multiprocessing` calls this; other picklers call `__reduce__`.
ForkingPickler.register(StagedState, StagedState.reduce_for_process)


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
    save: Save | None = getattr(_thread, "stored", None)
    saves = save.saves() if save is not None else None
    if (
        save is not None
        and saves is not None
        and save.mark is None
        and save.metadata_path == metadata_path
        and save_id not in saves.ended
    ):
        save.end(SaveMark(sequence, save_id))
    return SavedMeta(url, save_id, metadata_path=metadata_path, sequence=sequence)
