"""Tensors that several ranks have and one saves: each save's plan shows which, so that the next save copies them once.

When DCP plans, it drops all but one of equal items. By then every rank has copied all of them. The rank that keeps an
item depends on the plans alone, so it is the same in the next save. A tensor that another rank keeps is then not
copied. A placeholder in the staged state stands for it, and offers the planner the item of the previous save.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tierfs._fork import PerProcess
from tierfs.dcp.tensorbytes import PLAIN_TYPES, holds_shards
from tierfs.errors import InvalidInputError

FAILURES_MAX = 2
_logger = logging.getLogger("tierfs.dcp")


class _DelegatedData(TensorWriteData):  # type: ignore[misc]  # torch's classes are untyped here
    """Marks an item that this rank does not save, because another rank saves it."""


class RemoteReplica(torch.Tensor):  # type: ignore[misc]
    """Stands for a tensor that another rank saves. It has no elements."""

    items: Mapping[str, WriteItem]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """Return the tensor's items, by DCP's protocol for tensors that create their own items."""
        return [self.items[fqn]]

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Raise: inside the bytes of an object, the missing tensor would go unnoticed."""
        raise InvalidInputError(
            f"{', '.join(self.items)}: this rank left it to another rank, as in the last save, but now saves it in an "
            "object: the planner has changed. The next save copies everything again"
        )


class Replicas:
    """The tensors that other ranks save, as far as one writer knows them."""

    def __init__(self) -> None:
        self._items: Mapping[str, WriteItem] = {}
        self._open = 0  # the number of saves that left items to other ranks and were not planned, or not yet
        self._lock = PerProcess(threading.Lock)

    def __repr__(self) -> str:
        return f"Replicas({len(self._items)} known)"

    def take(self) -> Mapping[str, WriteItem]:
        """Return the items, by FQN, that need not be staged in a save.

        The items are forgotten until `learn` records a plan, and saves requested before that stage everything. So a
        wrong assumption about the items makes one save fail, and the next one stages everything. A planner that needs
        the items of other ranks would make every second save fail. So after `FAILURES_MAX` such failures, every save
        stages everything.
        """
        with self._lock():
            taken, self._items = self._items, {}
            if not taken:
                return {}
            if self._open == FAILURES_MAX:
                _logger.warning(
                    "%d saves failed in which ranks left replicas to the ranks that save them: from now on each rank "
                    "copies its whole state, as with stage='all'",
                    FAILURES_MAX,
                )
            self._open = min(self._open + 1, FAILURES_MAX + 1)
            return taken if self._open <= FAILURES_MAX else {}

    def learn(
        self,
        taken: Mapping[str, WriteItem],
        offered: Sequence[WriteItem] | None,
        kept: Iterable[WriteItem],
        *,
        has_delegated: bool,
    ) -> None:
        """Record the outcome of a plan.

        Args:
            taken: The result of `take` for the save that was planned.
            offered: The items of this rank; ``None`` if the planner said that nothing has changed.
            kept: The items that this rank has to save.
            has_delegated: Whether the plan left items to other ranks.
        """
        with self._lock():
            self._open = 0 if has_delegated else max(0, self._open - bool(taken))
        if offered is None:
            self._items = taken
            return
        ours = {item.index.fqn for item in kept}
        count = Counter(item.index.fqn for item in offered)
        found = {
            item.index.fqn: item
            for item in offered
            if item.tensor_data is not None and item.index.fqn not in ours and count[item.index.fqn] == 1
        }
        is_same = len(found) == len(taken) and all(taken.get(name) is item for name, item in found.items())
        # The same mapping tells `tierfs.dcp.save.state_plan` that nothing has changed.
        self._items = (
            taken
            if is_same
            else {
                name: WriteItem(item.index, item.type, tensor_data=_DelegatedData(**vars(item.tensor_data)))
                for name, item in found.items()
            }
        )


def placeholder(tensor: torch.Tensor, names: Sequence[str], items: Mapping[str, WriteItem]) -> RemoteReplica | None:
    """Return a stand-in for a tensor, if another rank saves the unchanged tensor under each of its names."""
    found = [items.get(name) for name in names]
    if not all(item is not None and _is_of(item, tensor) for item in found):
        return None
    return _stand_in({name: items[name] for name in names})


def _stand_in(items: Mapping[str, WriteItem]) -> RemoteReplica:
    made: RemoteReplica = torch.Tensor._make_subclass(RemoteReplica, torch.empty(0))
    made.items = items
    return made


def split(items: Sequence[WriteItem]) -> tuple[list[WriteItem], tuple[MetadataIndex, ...]]:
    """Return the items of a plan that this rank has staged, and the indexes of the items that it has not."""
    ours = [item for item in items if not isinstance(item.tensor_data, _DelegatedData)]
    return ours, tuple(item.index for item in items if isinstance(item.tensor_data, _DelegatedData))


def share_sizes(items: Iterable[WriteItem]) -> None:
    """Let the items of a save share equal sizes: DCP pickles plans, each object once, with the interpreter's lock held.

    Nobody else has the items yet, so they may change although they are frozen.
    """
    known: dict[Any, Any] = {}

    def one(size: Any) -> Any:
        return known.setdefault(size, size) if type(size) is torch.Size else size

    for index, data in [(item.index, item.tensor_data) for item in items if item.tensor_data is not None]:
        vars(index)["offset"], vars(data)["size"] = one(index.offset), one(data.size)
        vars(data.chunk).update(offsets=one(data.chunk.offsets), sizes=one(data.chunk.sizes))


def delegated_by(plan: SavePlan) -> tuple[MetadataIndex, ...]:
    """Return the items that a rank leaves to others, by this save's plan or an earlier one that is still valid.

    They are kept with a plan that a planner caches for later saves.
    """
    return plan.storage_data if isinstance(plan.storage_data, tuple) else ()


def _is_of(item: WriteItem, tensor: torch.Tensor) -> bool:
    data = item.tensor_data
    is_sharded = isinstance(tensor, DTensor)
    is_plain = type(tensor) in PLAIN_TYPES
    if not (is_sharded or is_plain) or tensor.is_nested or holds_shards(tensor):  # other tensors may have no shape
        return False
    if data.properties.dtype != tensor.dtype or data.size != tensor.shape:
        return False
    if is_sharded:
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        is_alike = data.chunk == ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        return item.type is WriteItemType.SHARD and is_alike
    return item.type is WriteItemType.TENSOR


def _reduce(placeholder: RemoteReplica) -> tuple[Any, ...]:
    return _stand_in, (placeholder.items,)


ForkingPickler.register(RemoteReplica, _reduce)  # for the process that saves
