"""`TierWriter`: a checkpoint of torch.distributed.checkpoint as one shard file per rank, and `.metadata` when all are there."""

from __future__ import annotations

import io
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future as StagingFuture
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierfs.dcp.address import Address, inside
from tierfs.dcp.metadatafile import CheckpointNote, Place, encode
from tierfs.dcp.reader import metadata_file
from tierfs.dcp.shardfile import Placed, ShardFile, find_staged
from tierfs.dcp.staging import stage
from tierfs.dcp.streaming import Part, object_part, stream, tensor_part
from tierfs.errors import AlreadyExistsError, CapacityError, InvalidInputError
from tierfs.flush.levels import Level
from tierfs.store import Store, Writer, kind_of, level_of, status, wait

__all__ = ["TierWriter"]

_logger = logging.getLogger("tierfs.dcp")


class TierWriter(StorageWriter):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves checkpoints into a tierfs store. StorageWriter and AsyncStager in one, for all saves of a run.

    `stage` copies tensors into memory that the flusher saves from, so `write_data` moves no tensor bytes. What was not
    staged (``dcp.save``) is copied there by `write_data`. Picklable; it keeps nothing of a save.

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
        ack: The level at which a save returns. Where the job spans hosts it is ``"object"`` whatever is asked for, since
            only then every rank's part can be read by every other.
        options: ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``, ``create``, and options of the object tier's
            filesystem by its protocol.

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
        ack: str = "staged",
        **options: Any,
    ) -> None:
        if _extensions:
            raise InvalidInputError("TierWriter has no _extensions: what is stored is encoded by the store")
        self._address = Address.of(path, {**options, "ack": ack})
        self._overwrite = overwrite
        self._save = _Save()

    def __repr__(self) -> str:
        return f"TierWriter({self._address.url!r}, ack={self._address.tiers.ack!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._here, "_overwrite": self._overwrite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _save=_Save())

    @property
    def _here(self) -> Address:
        """Where this thread's save goes."""
        return self._save.address or self._address

    @property
    def checkpoint_id(self) -> str:
        """The directory that is saved to."""
        return self._here.url

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
        """Copy a state dict, so that training may go on: see `tierfs.dcp.staging.stage`."""
        store, _ = self._here.open(write=True)
        try:
            return stage(state_dict, ShardFile(store))
        except CapacityError as error:
            _say_waves(store, error)
            return stage(state_dict, ShardFile(store, private=True))

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

    def storage_meta(self) -> StorageMeta:
        """What the metadata says of the place."""
        return StorageMeta(checkpoint_id=self._here.url, save_id=secrets.token_hex(16))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of who this is."""
        self._save.rank = kwargs.get("rank")
        self._save.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is: nothing is asked of the store by each rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are. Called on the coordinator alone.

        Raises:
            AlreadyExistsError: There is a checkpoint, and it may not be replaced.
        """
        store, path = self._here.open(write=True)
        if not self._overwrite and kind_of(store, inside(path, self._metadata_name())) is not None:
            raise AlreadyExistsError(
                f"{self._here.url} holds a checkpoint: save to another directory, or give overwrite=True", path=path
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items as one file.

        Raises:
            StoreError, CapacityError, ConflictError, TimeoutError: It could not be saved.
        """
        store, path = self._here.open(write=True)
        future: Future[list[WriteResult]] = Future()
        if not plan.items:
            future.set_result([])
            return future
        name = f"rank-{self._rank_here():05d}-{secrets.token_hex(4)}.safetensors"
        target, level, note = inside(path, name), self._level(store), {"format": "pt", "tierfs": "1"}
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        try:
            file, placed = self._place(store, items)
        except CapacityError as error:
            _say_waves(store, error)
            length, begins = stream(store, target, [_part(*item) for item in items], level=level, note=note)
            sizes = [_length(data) for _, data in items]
        else:
            length, offsets = file.commit(target, placed, level=level, note=note)
            begins = [offsets[id(where)] for where in placed]
            sizes = [where.length for where in placed]
        future.set_result(
            [
                WriteResult(item.index, size, (Place(name, begin, size), length))
                for (item, _), begin, size in zip(items, begins, sizes, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. Called when every rank has saved its file.

        Raises:
            StoreError, CapacityError, ConflictError, TimeoutError: It could not be published.
        """
        store, path = self._here.open(write=True)
        saved = [(result.index, *result.storage_data) for rank in results for result in rank]
        places = {index: place for index, place, _ in saved}
        files = {place.file: length for _, place, length in saved}
        meta = self.storage_meta()
        complete = replace(metadata, storage_data=places, storage_meta=meta)
        now_ns = store.clock.now_ns()
        note = CheckpointNote(meta.save_id, now_ns, now_ns, files=files)
        writer = Writer(store, inside(path, self._metadata_name()), level=self._level(store))
        writer.write(encode(complete, note))
        writer.commit()

    # -- levels --------------------------------------------------------------------------------------------------------

    def wait(self, level: str = "object", timeout: float | None = None) -> None:
        """Wait until what this host saved at the checkpoint's place has reached a level.

        Raises:
            TimeoutError: It has not, in time.
            ConflictError, TierfsError: What keeps it from getting there.
        """
        store, path = self._here.open()
        wait(store, path, Level.parse(level), timeout)

    def ack(self) -> str:
        """The level that the checkpoint has reached, as seen from this host."""
        store, path = self._here.open()
        return level_of(store, inside(path, self._metadata_name())).label

    def status(self) -> dict[str, Any]:
        """The store's, as ``tierfs status --json`` shows it."""
        return status(self._here.open()[0])

    # -- parts ---------------------------------------------------------------------------------------------------------

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
            found = find_staged(data)
            if found is not None and file in {None, found[0]}:
                file, placed[number] = found
            else:
                tensors.append((number, data))
        file = file or ShardFile(store)
        named = [(items[number][0].index.fqn, tensor) for number, tensor in tensors]
        for (number, _), (where, _) in zip(tensors, file.add_tensors(named), strict=True):
            placed[number] = where
        blobs = file.add_objects([(items[number][0].index.fqn, data) for number, data in objects])
        for (number, _), where in zip(objects, blobs, strict=True):
            placed[number] = where
        return file, [where for where in placed if where is not None]

    def _level(self, store: Store) -> Level:
        if store.tiers is None:
            return Level.OBJECT
        if _spans_hosts() and store.ack < Level.OBJECT:
            store.tiers.counters.fall_back(
                "raised_levels", "the job spans hosts, so its checkpoints are saved to the object tier at once"
            )
            return Level.OBJECT
        return store.ack

    def _rank_here(self) -> int:
        if self._save.rank is not None:
            return self._save.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _metadata_name(self) -> str:
        return metadata_file(None if self._save.use_collectives else self._rank_here())


def _part(item: WriteItem, data: Any) -> Part:
    if item.type is WriteItemType.BYTE_IO:
        return object_part(item.index.fqn, data.getbuffer())
    return tensor_part(item.index.fqn, data)


def _length(data: Any) -> int:
    return len(data.getbuffer()) if isinstance(data, io.BytesIO) else int(data.numel() * data.element_size())


def _say_waves(store: Store, error: CapacityError) -> None:
    assert store.tiers is not None
    store.tiers.counters.fall_back(
        "waves", "a checkpoint's part does not fit into the ram tier, and goes through it in waves: %s", error
    )


class _Save(threading.local):
    """What one thread's save is told of before it begins."""

    address: Address | None = None
    rank: int | None = None
    use_collectives: bool = True


def _spans_hosts() -> bool:
    world, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return world is not None and here is not None and world != here
