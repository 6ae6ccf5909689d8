"""Read tensors that torch's own writers stored, with either serialization.

A tensor is the output of ``torch.save`` at some offset of a file, or lies in a safetensors file that begins at that
offset.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from tierfs.checked_json import parse_object
from tierfs.codec.layout import torch_zip
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.load.items import ItemReader, put_in
from tierfs.dcp.load.shards import FileRange, ShardFiles, raise_named
from tierfs.dcp.tensorbytes import in_safetensors, narrowed, writable_bytes
from tierfs.dcp.torch_format.metadata import StockPlace
from tierfs.dcp.torch_format.streams import ReadStream, check_checksums
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, TierfsError

BATCH_BYTES_MAX = 256 << 20
STREAMED_BYTES_MIN = 64 << 20
"""An archive of at least this length is streamed, so that it is not in memory beside the tensor loaded from it."""
STREAM_BUFFER_BYTES = 1 << 20
HEADER_BYTES_MAX = 100_000_000


def read_items(files: ShardFiles, wanted: Sequence[tuple[Any, SavedItem]], planner: Any) -> None:
    """Read items into their destinations, whichever writer stored them.

    Arguments and errors as for `locate` and `ItemReader`.
    """
    bare = [pair for pair in wanted if not isinstance(pair[1].place, StockPlace)]
    if len(bare) < len(wanted):
        located, archived = locate(files, [pair for pair in wanted if isinstance(pair[1].place, StockPlace)])
        bare += located
        read_archives(files, archived, planner)
    bare.sort(key=lambda pair: files.order(pair[1].place.file, pair[1].place.at))
    ItemReader(files, planner).read(bare)


def locate(files: ShardFiles, wanted: Sequence[tuple[Any, SavedItem]]) -> tuple[list[tuple[Any, SavedItem]], list[Any]]:
    """Separate tensors in safetensors files from those that ``torch.save`` wrote.

    Returns:
        The items in safetensors files, with the places of their bare bytes; and the other items, unchanged.

    Raises:
        CorruptionError: A tensor is not where the metadata says.
    """
    places = sorted({(saved.place.file, saved.place.at) for _, saved in wanted})
    heads = [bytearray(8) for _ in places]
    files.read(FileRange(*place, memoryview(head), "a tensor") for place, head in zip(places, heads, strict=True))
    begins = {place: head for place, head in zip(places, heads, strict=True) if not head.startswith(torch_zip.LOCAL)}
    headers = {place: _header(files, *place, int.from_bytes(head, "little")) for place, head in begins.items()}
    bare: list[tuple[Any, SavedItem]] = []
    archived = []
    for item, saved in wanted:
        found = headers.get((saved.place.file, saved.place.at))
        if found is None:
            archived.append((item, saved))
        else:
            bare.append((item, _in_safetensors(files, item.storage_index, saved, *found)))
    return bare, archived


def read_archives(files: ShardFiles, wanted: Iterable[tuple[Any, SavedItem]], planner: Any) -> None:
    """Load tensors that ``torch.save`` wrote, with ``weights_only=True``, and copy the requested parts of each.

    An archive that tierfs has no digests of is checked against its checksums, which torch ignores.

    Raises:
        CorruptionError: Stored bytes are wrong, missing, or not a tensor.
        TierfsError: The read failed.
    """
    by_place = sorted(wanted, key=lambda pair: (pair[1].place.file, pair[1].place.at))
    batch: list[tuple[BytesPlace, list[Any], bytearray]] = []
    batch_bytes = 0
    for place, pairs in groupby(by_place, key=lambda pair: pair[1].place):
        items = [item for item, _ in pairs]
        if place.length >= STREAMED_BYTES_MIN:
            stream = io.BufferedReader(
                ReadStream(files.reader(place.file), place.at, place.length), STREAM_BUFFER_BYTES
            )
            _load(files, place, items, stream, planner)
            continue
        files.check(place.file, place.at, place.length, repr(items[0].storage_index.fqn))
        batch.append((place, items, bytearray(place.length)))
        batch_bytes += place.length
        if batch_bytes >= BATCH_BYTES_MAX:
            _load_batch(files, batch, planner)
            batch, batch_bytes = [], 0
    _load_batch(files, batch, planner)


def _load_batch(files: ShardFiles, batch: list[tuple[BytesPlace, list[Any], bytearray]], planner: Any) -> None:
    files.read(
        FileRange(place.file, place.at, memoryview(content), repr(items[0].storage_index.fqn))
        for place, items, content in batch
    )
    for place, items, content in batch:
        _load(files, place, items, io.BytesIO(content), planner)


def _load(files: ShardFiles, place: BytesPlace, items: list[Any], stream: Any, planner: Any) -> None:
    fqn = items[0].storage_index.fqn
    where = f"{fqn!r} in shard file {files.where(place.file)}"
    try:
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    except TierfsError as error:
        raise_named(error, where)
    except Exception as error:  # a damaged archive may raise nearly anything
        raise CorruptionError(f"{where} is not a tensor that torch.save wrote: {error}", path=place.file) from error
    if not isinstance(tensor, torch.Tensor):
        raise CorruptionError(f"{where} is not a tensor, but a {type(tensor).__name__}", path=place.file)
    stream.seek(0)
    check_checksums(files, place, fqn, stream, writable_bytes(tensor))
    for item in items:
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if len(offsets) != tensor.dim() or any(
            offset + length > whole for offset, length, whole in zip(offsets, lengths, tensor.shape, strict=True)
        ):
            raise CorruptionError(
                f"{where} has shape {list(tensor.shape)}, less than the metadata says", path=place.file
            )
        part = narrowed(tensor, offsets, lengths)
        target = planner.resolve_tensor(item).detach()
        if target.shape != part.shape:
            raise InvalidInputError(
                f"{fqn}: the destination has shape {list(target.shape)}, but the part to load has {list(lengths)}"
            )
        put_in(target, part)
        planner.commit_tensor(item, target)


def _header(files: ShardFiles, file: str, at: int, length: int) -> tuple[Mapping[str, Any], int]:
    """Return the table of a safetensors file that begins at an offset, and the offset of its data."""
    if not 0 < length <= min(HEADER_BYTES_MAX, files.reader(file).length - at - 8):
        raise CorruptionError(
            f"shard file {files.where(file)}: neither torch.save nor safetensors wrote the data at offset {at}",
            path=file,
        )
    text = bytearray(length)
    files.read([FileRange(file, at + 8, memoryview(text), "a table of tensors")])
    try:
        table = parse_object(text, files.where(file))
    except FormatError as error:
        raise CorruptionError(f"shard file {files.where(file)}: its table of tensors is damaged", path=file) from error
    return table, at + 8 + length


def _in_safetensors(
    files: ShardFiles, index: Any, saved: SavedItem, table: Mapping[str, Any], data_at: int
) -> SavedItem:
    """Return the saved item with the place of the tensor's bare bytes."""
    where = f"{index.fqn!r} in shard file {files.where(saved.place.file)}"
    assert saved.dtype is not None
    length = math.prod(saved.sizes) * saved.dtype.itemsize
    try:
        entry = table[index.fqn]
        described = (entry["dtype"], entry["shape"])
        begin, end = entry["data_offsets"]
        sharding = parse_object(table.get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"), where)
        offsets = sharding.get(index.fqn, {}).get("saved_offsets", list(index.offset))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"{where}: the file's table of tensors is damaged: {error!r}", path=saved.place.file
        ) from error
    if offsets != list(index.offset):
        raise CorruptionError(
            f"{where}: the chunk at {offsets} replaced the one at {list(index.offset)} when it was saved: torch keeps one "
            "chunk of a tensor in a safetensors file",
            path=saved.place.file,
        )
    expected = in_safetensors(saved.dtype, saved.sizes)
    if (
        expected is None
        or described != (expected[0], list(expected[1]))
        or type(begin) is not int
        or begin < 0
        or end != begin + length
    ):
        raise CorruptionError(
            f"{where}: the file's table has {entry!r}, but the metadata has {expected}", path=saved.place.file
        )
    return SavedItem(BytesPlace(saved.place.file, data_at + begin, length), saved.dtype, saved.sizes)
