"""`TierWriter`: a checkpoint of torch.distributed.checkpoint as one shard file per rank, and `.metadata` when all are there."""

from __future__ import annotations

import io
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future as StagingFuture
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierfs.dcp.address import Address, inside
from tierfs.dcp.checkpoint import metadata_file
from tierfs.dcp.load.rollback import key_of
from tierfs.dcp.metadata import CheckpointNote, Place, encode
from tierfs.dcp.objects import check_object
from tierfs.dcp.planning import begin_planning, end_planning
from tierfs.dcp.save.gpu import GpuStaging
from tierfs.dcp.save.refused import Refused
from tierfs.dcp.save.replicas import Elsewhere, Left, Replicas, left_by, split
from tierfs.dcp.save.saves import Save, SavedMeta, Saves, claim, hand_over, read_here
from tierfs.dcp.save.shard_file import Placed, ShardFile, check_is_held, find_staged, is_private
from tierfs.dcp.save.staged_state import UnstagedState
from tierfs.dcp.save.streaming import Part, object_part, stream, tensor_part
from tierfs.dcp.stager import stage
from tierfs.dcp.tensorbytes import has_size_in_plans, is_quantized, lacks_quantizer, refuse_unusual
from tierfs.dcp.torch_format.layout import SUFFIX, encode_pickle, write_archives
from tierfs.device.drain import Gate
from tierfs.errors import AlreadyExistsError, CapacityError, InvalidInputError
from tierfs.format.checkpoint import SaveMark
from tierfs.host.pending.levels import Level
from tierfs.store import Store, kind_of, level_of, status, wait
from tierfs.store.commit import Commits

__all__ = ["TierWriter"]

NAMED_MAX = 3  # in a message
YIELD_S = 0.001
LAYOUTS = ("tierfs", "dcp")


class TierWriter(StorageWriter):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves checkpoints into a tierfs store. StorageWriter and AsyncStager in one, for all saves of a run.

    `stage` copies tensors into memory that the flusher saves from, so `write_data` moves no tensor bytes. What was not
    staged (``dcp.save``) is copied there by `write_data`. Picklable, without its saves: of those it keeps which ones are under way, which
    one came to its end last, and what other ranks saved.

    Args:
        path: Of the checkpoint's directory: a URL as for `Address`. DCP's ``checkpoint_id`` takes its place.
        single_file_per_rank: As for ``FileSystemWriter``, and ignored: there is one always. So are ``sync_files``,
            ``thread_count``, ``per_thread_copy_ahead``, ``cache_staged_state_dict`` and ``serialization_format``.
        sync_files: See there.
        thread_count: See there.
        per_thread_copy_ahead: See there.
        cache_staged_state_dict: See there.
        overwrite: Whether a checkpoint that is there may be replaced; it can be loaded until the new one is complete.
        _extensions: Transformations of streams; not supported.
        serialization_format: See there.
        layout: ``"tierfs"``, or ``"dcp"`` for what torch's own readers read: ``FsspecReader`` from the store, ``FileSystemReader``
            from a copy. It takes one more copy of the tensors in memory, and ranks on several hosts need ``ack="object"``.
        ack: The level at which a save returns; ``None`` for what is configured. Where the ranks are on several hosts the
            checkpoint can be loaded once every part is in the object tier, whatever the level.
        stage: How `stage` makes tensors safe to change. ``"auto"``: in the device tier if ``device`` grants one, else in the ram
            tier. ``"device"``: the same, and an error where there is no GPU or no budget. ``"lazy"``: large tensors on a GPU are
            read in place while training computes, and every torch optimizer waits for that before its ``step``; see `fence`.
            ``"ram"``: in the ram tier. From the second save on a rank copies of equal tensors only those that it saves
            itself; with ``"all"``, which is ``"auto"`` otherwise, each rank copies all that it has.
        device: Budget of GPU memory for the device tier, ``"8GiB"``; ``None`` for what is configured, by default none. Twice the
            rank's state lets a save begin while the one before drains.
        options: ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``, ``codecs``, ``create``, and options of the object
            tier's filesystem by its protocol.

    Raises:
        InvalidInputError: An argument is no good.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        layout: str = "tierfs",
        ack: str | None = "staged",
        stage: str = "auto",
        device: str | int | None = None,
        **options: Any,
    ) -> None:
        if _extensions:
            raise InvalidInputError("TierWriter has no _extensions: what is stored is encoded by the store")
        self._gpu = GpuStaging(stage, device)
        self._stage_options = stage, device
        if layout not in LAYOUTS:
            raise InvalidInputError(f"layout is {' or '.join(map(repr, LAYOUTS))}, not {layout!r}")
        self._address = Address.of(path, {**options, "ack": ack})
        self._is_stock = layout == "dcp"
        self._overwrite = overwrite
        self._replicas = Replicas() if stage != "all" else None
        self._token = ""
        self._begin_anew()

    def __repr__(self) -> str:
        return f"TierWriter({self._address.url!r}, ack={self._address.tiers.ack!r})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, hand_over)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_address", "_is_stock", "_overwrite", "_stage_options")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_token": "", **state}, _replicas=None)
        self._gpu = GpuStaging(*self._stage_options)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._save = _Save()
        self._saves = Saves(self)
        self._staged_on: int | None = None  # the thread

    @property
    def _here(self) -> Address:
        """Where this thread's save goes."""
        return self._save.address or self._address

    @property
    def checkpoint_id(self) -> str:
        """The directory that is saved to, by the save that was asked for last."""
        return self._address.url

    @property
    def save_id(self) -> str | None:
        """The random id of the save that this writer came to the end of last, which its metadata names; ``None`` before."""
        done = self._saves.done
        return None if done is None or done.mark is None else done.mark.save_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a place in a tierfs store."""
        return os.fspath(checkpoint_id).startswith("tierfs:")

    # -- AsyncStager ---------------------------------------------------------------------------------------------------

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Nothing is left to do when `stage` has returned."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture[dict[str, Any]]:
        """Copy a state dict, so that training may go on: see `tierfs.dcp.stager.stage`.

        Where that fails and there are other ranks, which would wait for this one to plan, the save fails then, on every rank.
        """
        self._staged_on = threading.get_ident()
        save = self._saves.ask()
        try:
            store, _ = self._address.open(write=True)
            return self._staged(store, state_dict, save)
        except BaseException as error:
            if not isinstance(error, Exception) or not _others_wait():
                raise
            save.failure = error
            return UnstagedState(save)

    def _staged(self, store: Store, state_dict: dict[str, Any], save: Save) -> dict[str, Any]:
        elsewhere = self._replicas.take(save) if self._replicas is not None else {}
        if self._is_stock:  # what it writes goes through the ram tier once more, so the copy may not take that up
            return stage(state_dict, ShardFile(store, private=True, save=save, gpu=self._gpu), elsewhere)
        try:
            return stage(state_dict, ShardFile(store, save=save, gpu=self._gpu), elsewhere)
        except CapacityError as error:
            _say_waves(store, error)
            return stage(state_dict, ShardFile(store, private=True, save=save, gpu=self._gpu), elsewhere)

    def synchronize_staging(self) -> None:
        """Do nothing: staging ends with `stage`."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    # -- StorageWriter -------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to another place if one is given; the options stay.

        DCP runs each save on one thread, and several at once on several: where each goes is that thread's to know.
        """
        if checkpoint_id is not None:
            self._save.address = self._address = self._address.at(checkpoint_id)
            self._save.is_reset = True
            read_here(None)
        if self._staged_on not in {None, threading.get_ident()}:
            # Training's thread waits for this one to have begun, and then for the interpreter, for milliseconds.
            self._staged_on = None
            time.sleep(YIELD_S)

    def storage_meta(self) -> StorageMeta:
        """What the metadata says of the place."""
        return StorageMeta(checkpoint_id=self._here.url, save_id=secrets.token_hex(16))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of who this is, and where its save goes: another one may be sent elsewhere before it ends."""
        if not self._save.is_reset:
            self._save.address = self._address
        self._save.is_reset = False
        begin_planning()
        save = self._saves.begin(claim(self))
        save.address, save.token = self._save.address, self._token
        self._save.failure, save.failure = save.failure, None
        self._save.is_coordinator = is_coordinator
        self._save.rank = kwargs.get("rank")
        self._save.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without what another rank has staged. Nothing is asked of the store by each rank.

        Raises:
            Exception: What kept this rank's state from being staged.
            InvalidInputError: torch's planner would fail at a tensor's dtype without its name.
        """
        if (failure := self._save.failure) is not None:
            self._save.failure = None
            raise failure
        for item in plan.items:
            if item.tensor_data is not None and not has_size_in_plans(dtype := item.tensor_data.properties.dtype):
                raise InvalidInputError(
                    f"{item.index.fqn!r} is {dtype}, which torch's planner cannot save: save the bytes, view(torch.uint8)"
                )
        self._save.offered = plan.items if plan.usable else None
        ours, self._save.left = split(plan.items)
        return replace(plan, items=ours, storage_data=Left(self._save.left)) if self._save.left else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are, if every tensor that ranks left to each other is in one of them. Called on the coordinator alone.

        Raises:
            AlreadyExistsError: There is a checkpoint, and it may not be replaced; or it would be loaded in place of this one.
            InvalidInputError: A tensor is in none.
        """
        store, path = self._here.open(write=True)
        root = inside(path, self._metadata_name())
        if not self._overwrite and kind_of(store, root) is not None:
            raise AlreadyExistsError(
                # Begins with what torch's own writers say, which programs look for.
                f"Checkpoint already exists and self.overwrite=False: {self._here.url} holds a checkpoint: save to another directory, or "
                "give overwrite=True",
                path=path,
            )
        if not self._save.use_collectives and kind_of(store, inside(path, metadata_file())) is not None:
            raise AlreadyExistsError(
                f"Checkpoint already exists: {self._here.url} holds a checkpoint that ranks saved together, which would be loaded in place of what each saves "
                f"with use_collectives=False: save to another directory, or remove {metadata_file()} there",
                path=path,
            )
        if all(plan.usable for plan in plans):  # else they are only what has changed, and `finish` sees the rest
            self._check_owners(
                (item.index for plan in plans for item in plan.items),
                (index for plan in plans for index in left_by(plan)),
            )
        self._save.mark, self._save.is_new = Commits(store).begin(root, secrets.token_hex(16))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items as one file.

        Raises:
            StoreError, CapacityError, ConflictError, TimeoutError: It could not be saved.
            InvalidInputError: A tensor has no elements that could be, or an object could not be loaded again; names it.
        """
        end_planning()
        store, path = self._here.open(write=True)
        # Not stored: told to the coordinator, which sees to it that somebody else has.
        results = [WriteResult(index, 0, None) for index in self._save.left or left_by(plan)]
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        _check_planned(items)
        save = self._saves.go_on()
        if self._replicas is not None:
            was_left = bool(self._save.left) or self._save.offered is None
            self._replicas.learn(save, self._save.offered, plan.items, was_left=was_left)
        results += self._write(store, path, items) if items else []
        save.root = inside(path, self._metadata_name())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, store: Store, path: str, items: Sequence[tuple[WriteItem, Any]]) -> list[WriteResult]:
        rank, unique = self._rank_here(), secrets.token_hex(4)
        for item, data in () if self._is_stock else items:
            if item.type is WriteItemType.BYTE_IO:
                check_object(item.index.fqn, data.getbuffer())
        if self._is_stock:
            _check_archived(items)
            name = f"__{rank}_{unique}{SUFFIX}"
            length, begins, sizes = write_archives(store, inside(path, name), [data for _, data in items])
        else:
            name = f"rank-{rank:05d}-{unique}.safetensors"
            length, begins, sizes = self._write_shard(store, inside(path, name), items)
        host = _host_of(store)
        return [
            WriteResult(item.index, size, (Place(name, begin, size), length, host))
            for (item, _), begin, size in zip(items, begins, sizes, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, or where ranks are on several hosts have it published when all parts are there.

        Called when every rank has saved its file.

        Raises:
            StoreError, CapacityError, TimeoutError: It could not be published.
            InvalidInputError: A tensor that ranks left to each other was saved by none of them.
            ConflictError: It was not published, because a save to the same place that began later is published.
        """
        store, path = self._here.open(write=True)
        metadata.version = filesystem.CURRENT_DCP_VERSION  # of what is written and, as with torch's writers, returned
        here = _host_of(store)
        places: dict[MetadataIndex, Place] = {}
        files: dict[str, int] = {}
        is_elsewhere = False
        for result in itertools.chain.from_iterable(results):
            if result.storage_data is not None:
                place, length, host = result.storage_data
                places[result.index] = place
                files[place.file] = length
                is_elsewhere |= host != here
        self._check_owners(places, (result.index for result in itertools.chain.from_iterable(results)))
        commits, root, mark = Commits(store), inside(path, self._metadata_name()), self._save.mark
        assert mark is not None, "prepare_global_plan comes first"
        meta = StorageMeta(checkpoint_id=self._here.url, save_id=mark.save_id)
        spans_hosts = store.ack < Level.OBJECT and is_elsewhere
        if self._is_stock:
            if spans_hosts:
                raise InvalidInputError(
                    f"{self._here.url}: the ranks are on several hosts, and layout='dcp' cannot wait for their parts there: "
                    "save with ack='object'"
                )
            document = encode_pickle(metadata, places, meta)
        else:
            complete = replace(metadata, storage_data=places, storage_meta=meta)
            document = encode(complete, CheckpointNote(mark.save_id, mark.sequence, store.clock.now_ns(), files=files))
        if spans_hosts:
            commits.announce(path, document, mark)
        else:
            commits.publish(root, document, mark, is_new=self._save.is_new)
        # DCP returns it, to another process where that had us save.
        metadata.storage_meta = SavedMeta(self._here.url, mark.save_id, root=root, sequence=mark.sequence)
        self._saves.go_on().end(root, mark)

    def ended(self, save: Save, url: str | None = None) -> None:
        """See `tierfs.dcp.save.saves.Saver`."""
        if url is not None:
            self._address = save.address = self._address.at(url)
        self._saves.end(save)
        if save.mark is not None:
            self._gpu.publish(save, save.mark.save_id)

    def handed_over(self) -> Save:
        """See `tierfs.dcp.save.saves.Saver`."""
        return self._saves.hand_over()

    # -- levels --------------------------------------------------------------------------------------------------------

    def wait(self, level: str = "object", timeout: float | None = None) -> None:
        """Wait until what was saved where the last save went has reached a level.

        Call it when the last save is done, as its future says: until then nobody knows what that comes to. Of saves that overlap
        the last is the one whose `stage` was called last, or that began last without; the others may be under way still.

        Below ``"object"`` that is what this host saved; at ``"object"`` it is the whole checkpoint.

        Raises:
            TimeoutError: It has not, in time; names what is missing.
            NotFoundError: The last save has not come to its end on this rank; or it failed, on whichever rank, or was removed.
            ConflictError: The last save was superseded by one that began later.
            TierfsError: What keeps it from getting there.
        """
        store, path, root, mark = self._asked()
        wanted, begun = Level.parse(level), store.clock.monotonic()
        wait(store, path, wanted, timeout)
        if wanted is not Level.OBJECT:
            return
        left = None if timeout is None else max(0.0, timeout - (store.clock.monotonic() - begun))
        commits = Commits(store)
        commits.wait(path, left, mark)
        if mark is not None:
            commits.check_stands(root, mark)

    def ack(self) -> str:
        """The level that the checkpoint where the last save went has reached, as seen from this host.

        Raises:
            NotFoundError: There is none, or as `wait` does.
        """
        store, path, root, mark = self._asked()
        # A change that is this host's alone needs nobody else to be asked.
        pending = store.tiers.drafts.pending(root) if store.tiers is not None else None
        if pending is None and any(mark in {None, save.mark} for save in Commits(store).advance(path)):
            return Level.STAGED.label
        return level_of(store, root).label

    def status(self) -> dict[str, Any]:
        """The store's, as ``tierfs status --json`` shows it, with this writer's device tier."""
        store = self._address.open()[0]
        report = status(store)
        device = self._gpu.status(store)
        if device is not None:
            report["tiers"]["device"] = device
        return report

    def fence(self) -> None:
        """Order what is queued on the current stream from now on behind the saves that read tensors in place (``stage="lazy"``).

        Torch's optimizers do this before every ``step``. Call it before other code that changes what is being saved: a replay of a
        CUDA graph that holds the optimizer's step, an optimizer that is not torch's. Blocks until the copies are queued. With another
        ``stage`` nothing has to wait, and this does nothing.
        """
        self._gpu.fence()

    @property
    def gates(self) -> list[Gate]:
        """For each GPU in use, what holds the drain back while it is closed: `tierfs.device.Gate`."""
        return self._gpu.gates

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _asked(self) -> tuple[Store, str, str, SaveMark | None]:
        """Where the save that was asked for last went, the path of its metadata, and which one it is; ``None`` where there was none.

        Raises:
            NotFoundError: It has not come to its end.
        """
        save = self._saves.settled(self._address.url)
        store, path = ((save.address if save is not None else None) or self._address).open()
        if save is None:
            return store, path, inside(path, metadata_file()), None
        return store, path, save.root, save.mark

    def _write_shard(
        self, store: Store, path: str, items: Sequence[tuple[WriteItem, Any]]
    ) -> tuple[int, list[int], list[int]]:
        """The file's length, and the offset and length of each item."""
        note = {"format": "pt", "tierfs": "1"}
        try:
            file, placed = self._place(store, items)
        except CapacityError as error:
            _say_waves(store, error)
            length, begins = stream(store, path, [_part(*item) for item in items], note=note)
            return length, begins, [_length(data) for _, data in items]
        items_placed = zip(items, placed, strict=True)
        snapshots = file.snapshots(
            (key_of(item.index), data, where)
            for (item, data), where in items_placed
            if item.type is not WriteItemType.BYTE_IO
        )
        length, offsets = file.commit(path, placed, note=note)
        self._gpu.keep(self._saves.go_on(), snapshots)
        return length, [offsets[id(where)] for where in placed], [where.length for where in placed]

    def _place(self, store: Store, items: Sequence[tuple[WriteItem, Any]]) -> tuple[ShardFile, list[Placed]]:
        """Find each item where it was staged, and copy what was not."""
        placed: list[Placed | None] = [None] * len(items)
        tensors: list[tuple[int, torch.Tensor]] = []
        objects: list[tuple[int, memoryview]] = []
        file: ShardFile | None = None
        for number, (item, data) in enumerate(items):
            if item.type is WriteItemType.BYTE_IO:
                objects.append((number, data.getbuffer()))
                continue
            refuse_unusual(data, item.index.fqn)
            found = find_staged(data, store)
            if found is None and is_private(data):
                raise CapacityError("there was no room for the copy, and it is not waited for again", tier="ram")
            if found is not None:
                found[0].save = None  # it has begun, by whatever way its state came here
            if found is not None and file in {None, found[0]}:
                file, placed[number] = found
            else:
                tensors.append((number, data))
        file = file or ShardFile(store, gpu=self._gpu)
        named = [(items[number][0].index.fqn, tensor) for number, tensor in tensors]
        for (number, _), where in zip(tensors, file.add_placed(named), strict=True):
            placed[number] = where
        blobs = file.add_objects([(items[number][0].index.fqn, data) for number, data in objects])
        for (number, _), where in zip(objects, blobs, strict=True):
            placed[number] = where
        return file, [where for where in placed if where is not None]

    def _check_owners(self, owned: Iterable[MetadataIndex], left: Iterable[MetadataIndex]) -> None:
        there = set(owned)
        lost = list(dict.fromkeys(index.fqn for index in left if index not in there))
        if lost:
            raise InvalidInputError(
                f"{self._here.url}: no rank has {', '.join(lost[:NAMED_MAX])} to save ({len(lost)} tensors): one that saved "
                "it before has it no more. Save again, which copies everything, and where plans are cached without that; give "
                "stage='all' where ranks save on their own"
            )

    def _rank_here(self) -> int:
        if self._save.rank is not None:
            return self._save.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _metadata_name(self) -> str:
        return metadata_file(None if self._save.use_collectives else self._rank_here())


ForkingPickler.register(TierWriter, hand_over)


def _part(item: WriteItem, data: Any) -> Part:
    if item.type is WriteItemType.BYTE_IO:
        return object_part(item.index.fqn, data.getbuffer())
    return tensor_part(item.index.fqn, data)


def _check_planned(items: Sequence[tuple[WriteItem, Any]]) -> None:
    left = [item.index.fqn for item, data in items if isinstance(data, Elsewhere)]
    if left:
        raise InvalidInputError(
            f"this rank is to save {left[0]} and {len(left) - 1} more that it left to another one, as in the last save: "
            "the ranks' states have changed. The next save copies everything again"
        )
    for item, data in items:
        if isinstance(data, Refused):
            raise InvalidInputError(f"{item.index.fqn!r}: {data.why}")
        if item.type is WriteItemType.BYTE_IO:
            continue
        planned = item.tensor_data
        if (data.dtype, data.shape) != (planned.properties.dtype, planned.chunk.sizes):
            raise InvalidInputError(
                f"{item.index.fqn} is {data.dtype} {list(data.shape)}, and {planned.properties.dtype} "
                f"{list(planned.chunk.sizes)} by the plan, which says how it is read: a planner that keeps plans from save to "
                "save does not see that a dtype has changed; save without enable_plan_caching"
            )


def _check_archived(items: Sequence[tuple[WriteItem, Any]]) -> None:
    """See that ``torch.save`` can write what is a tensor, of some of which it knows more than their elements, and that none was saved before."""
    for item, data in items:
        if item.type is not WriteItemType.BYTE_IO and not (
            _is_whole_quantized(data) or hasattr(data, "__tensor_flatten__")
        ):
            refuse_unusual(data, item.index.fqn)
            check_is_held(data)


def _is_whole_quantized(tensor: Any) -> bool:
    return is_quantized(tensor) and not lacks_quantizer(tensor)


def _length(data: Any) -> int:
    return len(data.getbuffer()) if isinstance(data, io.BytesIO) else int(data.numel() * data.element_size())


def _say_waves(store: Store, error: CapacityError) -> None:
    assert store.tiers is not None
    store.tiers.counters.fall_back(
        "waves", "a checkpoint's part does not fit into the ram tier, and goes through it in waves: %s", str(error)
    )


def _others_wait() -> bool:
    return dist.is_available() and dist.is_initialized() and bool(dist.get_world_size() > 1)


def _host_of(store: Store) -> str:
    """Tells those who share this store's local tiers, and the order in which those are flushed, from all others."""
    return store.tiers.ram.host.name() if store.tiers is not None else ""


class _Save(threading.local):
    """What one thread's save is told of before it begins."""

    address: Address | None = None
    is_reset: bool = False
    is_coordinator: bool = True
    rank: int | None = None
    use_collectives: bool = True
    mark: SaveMark | None = None
    is_new: bool = False
    offered: Sequence[WriteItem] | None = None
    left: tuple[MetadataIndex, ...] = ()
    failure: Exception | None = None
