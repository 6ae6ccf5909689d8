"""Write the layout of torch's own writers: ``torch.save`` archives in ``.distcp`` files, and metadata as a pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.torch_format.streams import SaveSink
from tierfs.store import Store, Writer

SUFFIX = filesystem.DEFAULT_SUFFIX


def write_archives(
    store: Store, path: str, items: Sequence[torch.Tensor | io.BytesIO]
) -> tuple[int, list[int], list[int]]:
    """Write tensors and serialised objects as one file, from front to back, at the store's level.

    Args:
        store: The store to write to.
        path: Relative to the store; drawn at random.
        items: Tensors on any device. At most one tensor is copied at a time.

    Returns:
        The file's length, and the offset and the length of each item; all in bytes.

    Raises:
        StoreError, CapacityError, ReadOnlyError, ConflictError, TimeoutError: As `Writer` does.
    """
    begins, sizes = [], []
    writer = Writer(store, path, is_new=True)
    try:
        for item in items:
            begins.append(writer.length)
            if isinstance(item, io.BytesIO):
                writer.write(item.getbuffer())
            else:
                _save_tensor(item, SaveSink(writer))
            sizes.append(writer.length - begins[-1])
        length = writer.length
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return length, begins, sizes


def encode_pickle(metadata: Metadata, places: Mapping[MetadataIndex, BytesPlace], meta: StorageMeta) -> bytes:
    """Return the content that torch's writers put into ``.metadata``."""
    stored = {index: filesystem._StorageInfo(place.file, place.at, place.length) for index, place in places.items()}
    complete = replace(metadata, storage_data=stored, storage_meta=meta)
    return pickle.dumps(complete)


def _save_tensor(tensor: torch.Tensor, sink: SaveSink) -> None:
    try:
        torch.save(_alone(tensor), sink)
    except Exception:
        if sink.error is not None:
            raise sink.error from None
        raise


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds only its elements, because ``torch.save`` writes the whole storage."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    is_alone = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if is_alone else plain.clone(memory_format=torch.contiguous_format)
