"""Write a rank's items to its shard file.

They are written from the memory where they were staged, or copied there now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from tierfs.codec.layout.safetensors import HeaderEntry
from tierfs.dcp.save.fill import copy_in, snapshots_of
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.plan import cut, described, header, plan_runs, unique
from tierfs.dcp.save.saves import Save
from tierfs.dcp.save.shard_file import Place, ShardFile, staged_in
from tierfs.dcp.tensorbytes import refuse_unusual
from tierfs.device.transfer import BESIDE_TRAINING
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError
from tierfs.host.pending.levels import Level
from tierfs.store import Store
from tierfs.store.commit import part_of

Stored: TypeAlias = tuple[int, list[int], list[int]]
"""A file's length, the offset of each item in it, and the length of each; all in bytes."""


def write_shard(store: Store, path: str, items: Sequence[tuple[WriteItem, Any]], gpu: GpuStaging, save: Save) -> Stored:
    """Store a rank's items as one safetensors file, from the memory where they were staged, or by copying them.

    The path is relative to the store, and drawn at random. ``save`` learns where the items lie in the device tier.

    Raises:
        StoreError, CapacityError, ConflictError, TimeoutError: The file could not be stored.
        InvalidInputError: A tensor has no elements to store.
    """
    file, places = _place(store, items, gpu)
    tensors = (
        (item.index, data, place)
        for (item, data), place in zip(items, places, strict=True)
        if item.type is not WriteItemType.BYTE_IO
    )
    snapshots = snapshots_of(file.transfers, tensors)
    try:
        length, offsets = commit_shard(file, path, places)
    except BaseException:
        file.abort()  # the next save needs its memory, which the error would keep until garbage is collected
        raise
    save.snapshots = snapshots
    return length, offsets, [entry.length for _, entry in places]


def _place(store: Store, items: Sequence[tuple[WriteItem, Any]], gpu: GpuStaging) -> tuple[ShardFile, list[Place]]:
    """Find the staged items, copy the others, and return the file and the place of each item."""
    places: list[Place | None] = [None] * len(items)
    tensors: list[tuple[int, torch.Tensor]] = []
    objects: list[tuple[int, memoryview]] = []
    file: ShardFile | None = None
    for number, (item, data) in enumerate(items):
        if item.type is WriteItemType.BYTE_IO:
            objects.append((number, data.getbuffer()))
            continue
        refuse_unusual(data, item.index.fqn)
        found = staged_in(data)
        if found is not None:
            found[0].check_is_held()
        if found is not None and found[0].store is store and file in {None, found[0]}:
            file, places[number] = found
        else:
            if found is not None:
                found[0].check_arrived()
            tensors.append((number, data))
    is_new, file = file is None, file or ShardFile(store, gpu)
    try:
        named = [(items[number][0].index.fqn, tensor) for number, tensor in tensors]
        for (number, _), place in zip(tensors, _copied(file, named), strict=True):
            places[number] = place
        blobs = file.add_objects([(items[number][0].index.fqn, data) for number, data in objects])
        for (number, _), place in zip(objects, blobs, strict=True):
            places[number] = place
    except BaseException:
        if is_new:
            file.abort()  # the next save needs its memory
        raise
    return file, [place for place in places if place is not None]


def _copied(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Place]:
    """Copy tensors into a file, and return their places."""
    views = copy_in(file, tensors, at_once=True).result()
    file.wait_filled()
    return [
        found[1]
        if (found := staged_in(view)) is not None
        else (None, HeaderEntry(unique(name, file.names), *described(tensor.dtype, tensor.shape, 0), 0, 0))
        for view, (name, tensor) in zip(views, tensors, strict=True)
    ]


def commit_shard(file: ShardFile, path: str, wanted: Sequence[Place], *, is_log: bool = False) -> tuple[int, list[int]]:
    """Publish a shard file under a name. Runs that hold no wanted part are left out.

    Afterwards the file is over, even if this fails. The path is relative to the file's store, and new. The file is a part
    of a checkpoint, at the store's level on return; or with ``is_log`` one of a log, which is staged then.

    Returns:
        The file's length, and the offset of each wanted part in the file; both in bytes.

    Raises:
        StoreError, CorruptionError: A copy from a GPU failed. The message says why.
        TimeoutError, StoreError, CapacityError, ConflictError, ReadOnlyError: See `Writer.commit`.
    """
    memory = file.close()
    places = _without_the_rest(file, wanted)
    needed = {id(run) for run, _ in places}
    runs = [run for run in file.runs if id(run) in needed]
    # Seal first, so that the flusher can begin: making the header takes a while.
    # If a GPU is in use, training goes on meanwhile, and needs a processor and the interpreter's lock.
    # A thread costs more than hashing a few MiB.
    few = 1 if sum(len(run.view) for run in runs) < CHUNK_BYTES else None
    memory.seal(runs, threads_max=BESIDE_TRAINING if file.transfers else few)
    used = {id(run) for run, _ in wanted}
    file.check_arrived([run for run in file.runs if id(run) in used])
    other = _seen_otherwise(places)
    entries = []
    begins: dict[int, int] = {}
    end = 0
    for run in runs:
        begins[id(run)] = end
        for entry in run.entries:
            dtype, shape = other.get((id(run), entry.at), (entry.dtype, entry.shape))
            entries.append(HeaderEntry(entry.name, dtype, shape, end + entry.at, entry.length))
        end += len(run.view)
    entries += [entry._replace(at=end) for run, entry in places if run is None]
    head = header(entries)
    (first,) = memory.add_runs([cut(len(head))], wait=file.waits)
    first.view[:] = head
    memory.seal([first])
    level, metadata = (Level.STAGED, None) if is_log else (None, part_of(file.store))
    parts = [first, *runs]
    memory.commit(path, parts, level=level, metadata=metadata, is_new=True)
    return len(head) + end, [len(head) + begins.get(id(run), end) + entry.at for run, entry in places]


def _without_the_rest(file: ShardFile, wanted: Sequence[Place]) -> Sequence[Place]:
    """Return the place of each wanted part, after packing mixed runs again without the unwanted parts.

    Unwanted parts are replicas that another rank saves. If there is no room to pack again, they stay in the file.
    """
    there = {(id(run), entry.at) for run, entry in wanted}
    mixed = {id(run) for run in file.runs if any((id(run), entry.at) not in there for entry in run.entries)}
    sources = list(dict.fromkeys(place for place in wanted if id(place[0]) in mixed))
    plans = plan_runs([(entry.name, entry.dtype, entry.length) for _, entry in sources])
    try:
        packed = file.begin_runs([lengths for _, lengths in plans], wait=False)
    except CapacityError as error:
        if file.store.tiers is not None:
            file.store.tiers.counters.fall_back(
                "kept_replicas",
                "this rank also stores tensors that another rank saves, for lack of room to leave them out: %s",
                error,
            )
        return wanted
    names: set[str] = set()
    moved: dict[Place, Place] = {}
    for (numbers, _), target in zip(plans, packed, strict=True):
        entries: list[HeaderEntry] = []
        at = 0
        for run, entry in map(sources.__getitem__, numbers):
            assert run is not None
            target.view[at : at + entry.length] = run.view[entry.at : entry.at + entry.length]
            name = entry.name if entry.name not in names else unique(entry.name, file.names)
            names.add(name)
            entries.append(entry._replace(name=name, at=at))
            moved[run, entry] = target, entries[-1]
            at += entry.length
        target.entries = entries
    return [moved.get(place, place) for place in wanted]


def _seen_otherwise(wanted: Sequence[Place]) -> dict[tuple[int, int], tuple[str, tuple[int, ...]]]:
    """Return dtype and shape, by run and offset, of tensors that are saved with others than when they were staged.

    A planner may reshape a tensor, or view its bits as another dtype. If the saved views of one tensor disagree, the
    header describes it as bytes.
    """
    staged = [entry if run is None else run.find(entry.at) for run, entry in wanted]
    odd = {(id(run), there.at) for (run, entry), there in zip(wanted, staged, strict=True) if entry is not there}
    seen: dict[tuple[int, int], tuple[HeaderEntry, list[HeaderEntry]]] = {}
    for (run, entry), there in zip(wanted, staged, strict=True) if odd else ():
        if (place := (id(run), there.at)) in odd:
            seen.setdefault(place, (there, []))[1].append(entry)
    found = {}
    for place, (there, takes) in seen.items():
        dtypes = {take.dtype for take in takes}
        shapes = {take.shape for take in takes if take.length == there.length}
        if len(dtypes) == 1 and len(shapes) == 1:
            found[place] = dtypes.pop(), shapes.pop()
        elif dtypes != {there.dtype} or shapes:
            found[place] = "U8", (there.length,)
    return found
