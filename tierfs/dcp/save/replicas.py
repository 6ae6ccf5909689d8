"""Tensors that every rank has and one saves: which those are is learned from each save's plan, so that the next copies them once.

DCP drops all but one of equal items when it plans, after every rank has copied all of them. Which rank keeps which depends on
the plans alone, so it is the same the next time. A tensor that another rank keeps is not copied; a placeholder takes its
place in the staged state, and offers the planner the item of the save before.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tierfs._fork import PerProcess
from tierfs.dcp.save.local_shards import holds_shards
from tierfs.dcp.tensorbytes import PLAIN_TYPES
from tierfs.errors import InvalidInputError

__all__ = ["Delegated", "RemoteReplica", "Replicas", "delegated_by", "placeholder", "split"]

FAILURES_MAX = 2
_logger = logging.getLogger("tierfs.dcp")


class _DelegatedData(TensorWriteData):  # type: ignore[misc]  # torch's classes are untyped here
    """Marks an item that this rank offers to nobody, since another one saves it."""


class RemoteReplica(torch.Tensor):  # type: ignore[misc]
    """Stands for a tensor that another rank saves. It has no elements."""

    items: Mapping[str, WriteItem]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """Its items, by DCP's protocol for tensors that know them."""
        return [self.items[fqn]]

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to become part of an object's bytes, where nobody would look for what is missing."""
        raise InvalidInputError(
            f"{', '.join(self.items)}: another rank is to save it, as in the last save, and this one has it in an object: the "
            "planner has changed. The next save copies everything again"
        )


@dataclass(frozen=True, slots=True)
class Delegated:
    """Items that a rank's plan leaves to others. They stay with a plan that a planner keeps for later saves."""

    indexes: tuple[MetadataIndex, ...]


class Replicas:
    """One writer's knowledge of the tensors that other ranks save."""

    def __init__(self) -> None:
        self._items: Mapping[str, WriteItem] = {}
        self._taken: weakref.WeakKeyDictionary[object, Mapping[str, WriteItem]] = weakref.WeakKeyDictionary()
        self._open = 0  # of how many saves that left something to others it was not known what became of that
        self._failures = 0
        self._lock = PerProcess(threading.Lock)

    def __repr__(self) -> str:
        return f"Replicas({len(self._items)} known)"

    def take(self, save: object) -> Mapping[str, WriteItem]:
        """Items by FQN that need not be staged now. Until a save has come to its end all are staged again.

        So what turns out to be wrong about them costs one save, and not the next. With a planner that can never do without
        what others save, that would be every second one: after `FAILURES_MAX` in a row everything is staged for good.

        Args:
            save: For which. When nobody holds that any more, and nothing was learned of it, it has failed.
        """
        with self._lock():
            failed = self._open - len(self._taken)
            if self._failures < FAILURES_MAX <= self._failures + failed:
                _logger.warning(
                    "%d saves failed in which replicas were left to the ranks that save them: each rank copies all that it has "
                    "from now on, as with stage='all'",
                    FAILURES_MAX,
                )
            self._failures += failed
            taken, self._items = self._items if self._failures < FAILURES_MAX else {}, {}
            if taken:
                self._taken[save] = taken
            self._open = len(self._taken)
            return taken

    def learn(
        self, save: object, offered: Sequence[WriteItem] | None, kept: Iterable[WriteItem], *, has_delegated: bool
    ) -> None:
        """Note what became of a plan.

        Args:
            save: Whose.
            offered: The items of this rank; ``None`` where a planner said that nothing has changed.
            kept: The items that it was given to save.
            has_delegated: Whether it left something to others.
        """
        with self._lock():
            taken = self._taken.pop(save, {})
            self._open -= bool(taken)
            if has_delegated and self._failures < FAILURES_MAX:
                self._failures = 0
        if offered is None:
            self._items = taken
            return
        ours = {item.index.fqn for item in kept}
        count = Counter(item.index.fqn for item in offered)
        self._items = {
            item.index.fqn: _marked(item)
            for item in offered
            if item.tensor_data is not None and item.index.fqn not in ours and count[item.index.fqn] == 1
        }


def placeholder(tensor: torch.Tensor, names: Sequence[str], items: Mapping[str, WriteItem]) -> RemoteReplica | None:
    """A stand-in for a tensor, if another rank saves it under each of its names, and it has not changed."""
    found = [items.get(name) for name in names]
    if not all(item is not None and _is_of(item, tensor) for item in found):
        return None
    return _stand_in({name: items[name] for name in names})


def _stand_in(items: Mapping[str, WriteItem]) -> RemoteReplica:
    made: RemoteReplica = torch.Tensor._make_subclass(RemoteReplica, torch.empty(0))
    made.items = items
    return made


def split(items: Sequence[WriteItem]) -> tuple[list[WriteItem], tuple[MetadataIndex, ...]]:
    """The items of a plan that this rank has staged, and where those belong that it has not."""
    ours = [item for item in items if not isinstance(item.tensor_data, _DelegatedData)]
    return ours, tuple(item.index for item in items if isinstance(item.tensor_data, _DelegatedData))


def delegated_by(plan: SavePlan) -> tuple[MetadataIndex, ...]:
    """Items that a rank leaves to others, by the plan of this save or of an earlier one that still holds."""
    return plan.storage_data.indexes if isinstance(plan.storage_data, Delegated) else ()


def _marked(item: WriteItem) -> WriteItem:
    data = item.tensor_data
    marked = _DelegatedData(**{field.name: getattr(data, field.name) for field in fields(TensorWriteData)})
    return WriteItem(item.index, item.type, tensor_data=marked)


def _is_of(item: WriteItem, tensor: torch.Tensor) -> bool:
    data = item.tensor_data
    is_sharded = isinstance(tensor, DTensor)
    is_plain = type(tensor) in PLAIN_TYPES
    if not (is_sharded or is_plain) or tensor.is_nested or holds_shards(tensor):  # others may have no shape
        return False
    if data.properties.dtype != tensor.dtype or data.size != tensor.shape:
        return False
    if is_sharded:
        return item.type is WriteItemType.SHARD and data.chunk == _box_of(tensor)
    return item.type is WriteItemType.TENSOR


def _reduce(placeholder: RemoteReplica) -> tuple[Any, ...]:
    return _stand_in, (placeholder.items,)


def _box_of(tensor: DTensor) -> ChunkStorageMetadata:
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


ForkingPickler.register(RemoteReplica, _reduce)  # on its way to the process that saves
