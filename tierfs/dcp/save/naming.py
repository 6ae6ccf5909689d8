"""How a shard file gets its name: a header, the runs that hold something wanted, and those packed anew that do not all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tierfs.codec.layout.safetensors import HeaderEntry
from tierfs.dcp.save.placed import FileRun, Placed
from tierfs.dcp.save.plan import PlannedPiece, cut, header, plan_runs
from tierfs.dcp.save.tensor_plan import unique
from tierfs.device.transfer import BESIDE_TRAINING, Transfer
from tierfs.errors import CapacityError, CorruptionError
from tierfs.store import Store
from tierfs.store.commit import part_of
from tierfs.store.write.in_place import StagedFile

__all__ = ["Naming"]


class Naming:
    """Commits one shard file.

    Args:
        store: Where to.
        file: Its memory.
        runs: All of it, in order; those that `pack` begins are added.
        names: In the header, those taken.
        transfers: From GPUs, each with the runs that it filled.
        pack: Begins runs of chunks of these lengths, if there is room at once; raises CapacityError otherwise.
    """

    def __init__(
        self,
        store: Store,
        file: StagedFile,
        runs: Sequence[FileRun],
        names: set[str],
        transfers: Sequence[tuple[Transfer, Sequence[FileRun]]],
        pack: Callable[[Sequence[Sequence[int]]], Sequence[tuple[FileRun, object]]],
    ) -> None:
        self._store = store
        self._file = file
        self._runs = runs
        self._names = names
        self._transfers = transfers
        self._pack = pack

    def commit(self, path: str, wanted: Sequence[Placed], note: Mapping[str, str]) -> tuple[int, dict[int, int]]:
        """See `ShardFile.commit`."""
        lies = self._without_the_rest(wanted)
        needed = {id(placed.run) for placed in lies.values() if placed.run is not None}
        runs = [run for run in self._runs if id(run) in needed]
        # First, for the flusher to begin: a header takes a while.
        # Training goes on meanwhile where a GPU is in use: it needs a processor, and the interpreter's lock.
        self._file.seal([run.memory for run in runs], threads_max=BESIDE_TRAINING if self._transfers else None)
        self._check_arrived()
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
            HeaderEntry(placed.name, placed.dtype, placed.shape, end, 0)
            for placed in lies.values()
            if placed.run is None
        ]
        head = header(entries, note)
        (first,) = self._file.add_runs([cut(len(head))])
        first.view[:] = head
        self._file.seal([first])
        memory = [first, *(run.memory for run in runs)]
        self._file.commit(path, memory, metadata=part_of(self._store), is_new=True)
        offsets = {
            number: len(head) + (begins[id(placed.run)] + placed.at if placed.run is not None else end)
            for number, placed in lies.items()
        }
        return len(head) + end, offsets

    def _check_arrived(self) -> None:
        """See that the bytes that were hashed on a GPU are those that were sealed here.

        Raises:
            CorruptionError: They changed on their way.
        """
        for transfer, runs in self._transfers:
            for run, digests in zip(runs, transfer.digests, strict=False):
                sealed = run.memory.digests()
                if any(there not in {b"", here} for here, there in zip(digests, sealed, strict=True)):
                    raise CorruptionError(
                        f"bytes of {run.entries[0].name} changed between the GPU and host memory: this save is void, and training "
                        "holds the right ones still: save again, and look for hardware errors (nvidia-smi -q, dmesg) if it recurs",
                        tier="device",
                    )

    def _without_the_rest(self, wanted: Sequence[Placed]) -> dict[int, Placed]:
        """Where each wanted one (by its ``id``) lies, when packs have been packed anew without what is not wanted.

        What is not wanted is what another rank saves: replicas. They stay in where there is no room for it.
        """
        lies = {id(placed): placed for placed in wanted}
        places = {(id(placed.run), placed.at) for placed in wanted}
        mixed = {id(run) for run in self._runs if any((id(run), placed.at) not in places for placed in run.placed)}
        sources = [placed for placed in lies.values() if id(placed.run) in mixed]
        plans = plan_runs([PlannedPiece(source.name, source.dtype, source.length) for source in sources])
        try:
            packed = self._pack([plan.lengths for plan in plans])
        except CapacityError as error:
            if self._store.tiers is not None:
                self._store.tiers.counters.fall_back(
                    "kept_replicas",
                    "what another rank saves is stored once more, beside what this one saves: %s",
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
                name = source.name if source.name not in names else unique(source.name, self._names)
                names.add(name)
                entries.append(HeaderEntry(name, source.dtype, source.shape, at, source.length))
                at += source.length
            run.entries = entries
            lies.update((id(sources[number]), placed) for number, placed in zip(plan.pieces, run.placed, strict=True))
        return lies


def _seen_otherwise(wanted: Iterable[Placed]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Tensors that are saved with another dtype or shape than they were staged with, by their number in the staged state.

    A planner may reshape a tensor, or take its bits for another dtype. Where some of them take them for one and some for
    another, they are bytes.
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
