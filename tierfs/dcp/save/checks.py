"""Checks of a save's items before they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from tierfs.dcp.objects import check_object
from tierfs.dcp.save.replicas import RemoteReplica
from tierfs.dcp.tensorbytes import Refused, has_size_in_plans
from tierfs.errors import AlreadyExistsError, InvalidInputError
from tierfs.format.checkpoint import metadata_file
from tierfs.format.keys import inside
from tierfs.store import Store, kind_of

NAMED_MAX = 3  # in a message


def check_owners(url: str, owned: Iterable[MetadataIndex], delegated: Iterable[MetadataIndex]) -> None:
    """Check that some rank saves each tensor that ranks left to each other.

    Raises:
        InvalidInputError: No rank saves a tensor. The message names it.
    """
    there = set(owned)
    lost = list(dict.fromkeys(index.fqn for index in delegated if index not in there))
    if lost:
        raise InvalidInputError(
            f"{url}: no rank saves {', '.join(lost[:NAMED_MAX])} ({len(lost)} tensors): the rank that saved it before "
            "no longer has it. Save again, which copies everything, and without enable_plan_caching if it is set; if "
            "ranks save on their own, use stage='all'"
        )


def check_plannable(items: Iterable[WriteItem]) -> None:
    """Check that torch's planner knows the size of each dtype. The planner itself would fail without a name.

    Raises:
        InvalidInputError: The planner does not know a dtype. The message names the tensor.
    """
    for item in items:
        if item.tensor_data is not None and not has_size_in_plans(dtype := item.tensor_data.properties.dtype):
            raise InvalidInputError(
                f"{item.index.fqn!r} is {dtype}, which torch's planner cannot save: save the bytes, view(torch.uint8)"
            )


def check_planned(items: Sequence[tuple[WriteItem, Any]]) -> None:
    """Check that this rank has the items that it has to save, as the plan describes them.

    Raises:
        InvalidInputError: An item is missing or differs. The message names it.
    """
    delegated = [item.index.fqn for item, data in items if isinstance(data, RemoteReplica)]
    if delegated:
        raise InvalidInputError(
            f"the plan gives this rank {delegated[0]} and {len(delegated) - 1} more that it left to another rank, as "
            "in the last save: the ranks' states have changed. The next save copies everything again"
        )
    for item, data in items:
        if isinstance(data, Refused):
            raise InvalidInputError(f"{item.index.fqn!r}: {data.why}")
        if item.type is WriteItemType.BYTE_IO:
            continue
        planned = item.tensor_data
        if (data.dtype, data.shape) != (planned.properties.dtype, planned.chunk.sizes):
            raise InvalidInputError(
                f"{item.index.fqn} is {data.dtype} {list(data.shape)}, but {planned.properties.dtype} "
                f"{list(planned.chunk.sizes)} in the plan, which a load follows: a planner that caches plans does not "
                "notice that a dtype has changed; save without enable_plan_caching"
            )


def check_free(store: Store, url: str, path: str, metadata_path: str, *, overwrite: bool, together: bool) -> None:
    """Check that a checkpoint may be saved to a directory.

    ``together`` says whether the ranks save with collectives.

    Raises:
        AlreadyExistsError: A checkpoint is there and may not be replaced, or a load would find it instead of the new
            one.
    """
    if not overwrite and kind_of(store, metadata_path) is not None:
        raise AlreadyExistsError(
            # Begins like the message of torch's own writers, which programs search for.
            f"Checkpoint already exists and self.overwrite=False: {url} holds a checkpoint: save to another directory, or "
            "give overwrite=True",
            path=path,
        )
    if not together and kind_of(store, inside(path, metadata_file())) is not None:
        raise AlreadyExistsError(
            f"Checkpoint already exists: {url} holds a checkpoint that ranks saved together, which would be loaded "
            f"instead of this save with use_collectives=False: save to another directory, or remove {metadata_file()} "
            "there",
            path=path,
        )


def check_objects(items: Sequence[tuple[WriteItem, Any]]) -> None:
    """Check that objects can be loaded again: see `check_object`."""
    for item, data in items:
        if item.type is WriteItemType.BYTE_IO:
            check_object(item.index.fqn, data.getbuffer())
