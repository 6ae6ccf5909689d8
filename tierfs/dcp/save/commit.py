"""Commit a shard file: seal the runs with wanted parts, check them, write the header, and publish the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierfs.codec.layout.safetensors import HeaderEntry
from tierfs.dcp.save.placed import Placed
from tierfs.dcp.save.plan import PlannedPiece, cut, header, plan_runs, unique
from tierfs.dcp.save.shard_file import ShardFile, changed_on_the_way
from tierfs.device.transfer import BESIDE_TRAINING
from tierfs.digest import DigestKind
from tierfs.errors import CapacityError
from tierfs.store.commit import part_of


def commit_shard(file: ShardFile, path: str, wanted: Sequence[Placed]) -> tuple[int, dict[int, int]]:
    """Publish a shard file under a name. Runs that hold no wanted part are left out.

    Afterwards the file is over, even if this fails.

    Args:
        file: An open shard file.
        path: Relative to the file's store; drawn at random.
        wanted: The parts that the checkpoint refers to.

    Returns:
        The file's length, and the offset of each wanted part in the file, by the part's ``id``; both in bytes.

    Raises:
        StoreError, CorruptionError: A copy from a GPU failed. The message says why.
        TimeoutError, StoreError, CapacityError, ConflictError, ReadOnlyError: See `Writer.commit`.
    """
    memory = file.close()
    lies = _without_the_rest(file, wanted)
    needed = {id(placed.run) for placed in lies.values() if placed.run is not None}
    runs = [run for run in file.runs if id(run) in needed]
    # Without local tiers, sealing hashes nothing.
    seals_alike = file.store.tiers is not None and file.store.descriptor.digest_kind is DigestKind.XXH3_128
    # The digests of the other runs are compared when these are sealed.
    used = {id(placed.run) for placed in wanted}
    file.check_arrived([run for run in file.runs if id(run) in used and not (seals_alike and id(run) in needed)])
    # Seal first, so that the flusher can begin: making the header takes a while.
    # If a GPU is in use, training goes on meanwhile, and needs a processor and the interpreter's lock.
    memory.seal([run.memory for run in runs], threads_max=BESIDE_TRAINING if file.transfers else None)
    if seals_alike:
        _check_arrived(file)
    begins: dict[int, int] = {}
    end = 0
    for run in runs:
        begins[id(run)] = end
        end += run.memory.length
    other = _seen_otherwise(placed for placed in lies.values() if placed.run is not None)
    entries = [
        HeaderEntry(
            placed.name,
            *other.get(id(placed), (placed.dtype, placed.shape)),
            begins[id(run)] + placed.at,
            placed.length,
        )
        for run in runs
        for placed in run.placed
    ]
    entries += [
        HeaderEntry(placed.name, placed.dtype, placed.shape, end, 0) for placed in lies.values() if placed.run is None
    ]
    head = header(entries)
    (first,) = memory.add_runs([cut(len(head))])
    first.view[:] = head
    memory.seal([first])
    memory.commit(path, [first, *(run.memory for run in runs)], metadata=part_of(file.store), is_new=True)
    offsets = {
        number: len(head) + (begins[id(placed.run)] + placed.at if placed.run is not None else end)
        for number, placed in lies.items()
    }
    return len(head) + end, offsets


def _check_arrived(file: ShardFile) -> None:
    """Check that the bytes that were hashed on a GPU equal the bytes that were sealed in host memory.

    Raises:
        CorruptionError: The bytes changed in transfer.
    """
    for transfer, runs in file.transfers:
        for run, digests in zip(runs, transfer.digests, strict=False):
            sealed = run.memory.digests()
            if any(there not in {b"", here} for here, there in zip(digests, sealed, strict=True)):
                raise changed_on_the_way(run)


def _without_the_rest(file: ShardFile, wanted: Sequence[Placed]) -> dict[int, Placed]:
    """Return the place of each wanted part, by its ``id``, after packing mixed runs again without the unwanted parts.

    Unwanted parts are replicas that another rank saves. If there is no room to pack again, they stay in the file.
    """
    lies = {id(placed): placed for placed in wanted}
    places = {(id(placed.run), placed.at) for placed in wanted}
    mixed = {id(run) for run in file.runs if any((id(run), placed.at) not in places for placed in run.placed)}
    sources = [placed for placed in lies.values() if id(placed.run) in mixed]
    plans = plan_runs([PlannedPiece(source.name, source.dtype, source.length) for source in sources])
    try:
        packed = file.begin_runs([plan.lengths for plan in plans], wait=False)
    except CapacityError as error:
        if file.store.tiers is not None:
            file.store.tiers.counters.fall_back(
                "kept_replicas",
                "this rank also stores tensors that another rank saves, for lack of room to leave them out: %s",
                error,
            )
        return lies
    names: set[str] = set()
    for plan, (run, _) in zip(plans, packed, strict=True):
        entries: list[HeaderEntry] = []
        at = 0
        for source in map(sources.__getitem__, plan.pieces):
            assert source.run is not None
            run.memory.view[at : at + source.length] = source.run.memory.view[source.at : source.at + source.length]
            name = source.name if source.name not in names else unique(source.name, file.names)
            names.add(name)
            entries.append(HeaderEntry(name, source.dtype, source.shape, at, source.length))
            at += source.length
        run.entries = entries
        lies.update((id(sources[number]), placed) for number, placed in zip(plan.pieces, run.placed, strict=True))
    return lies


def _seen_otherwise(wanted: Iterable[Placed]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape, by the ``id`` of the staged part, of tensors that are saved with others than when staged.

    A planner may reshape a tensor, or view its bits as another dtype. If the saved views of one tensor disagree, the
    header describes it as bytes.
    """
    seen: dict[int, tuple[Placed, list[Placed]]] = {}
    for placed in wanted:
        assert placed.run is not None
        staged = placed.run.find(placed.at)
        seen.setdefault(id(staged), (staged, []))[1].append(placed)
    found = {}
    for number, (staged, takes) in seen.items():
        if all(take is staged for take in takes):
            continue
        dtypes = {take.dtype for take in takes}
        shapes = {take.shape for take in takes if take.length == staged.length}
        if len(dtypes) == 1 and len(shapes) == 1:
            found[number] = dtypes.pop(), shapes.pop()
        elif dtypes != {staged.dtype} or shapes:
            found[number] = "U8", (staged.length,)
    return found
