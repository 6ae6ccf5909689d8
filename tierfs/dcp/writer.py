"""`TierWriter`: a checkpoint of torch.distributed.checkpoint as one shard file per rank, and `.metadata` when all are there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future as StagingFuture
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import metadata_file
from tierfs.dcp.metadata import BytesPlace
from tierfs.dcp.planning import begin_planning, end_planning
from tierfs.dcp.save import checks, publish
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.replicas import Delegated, Replicas, delegated_by, split
from tierfs.dcp.save.saves import Save, SavedMeta, Saves, ThreadSave, claim, others_wait, read_here, reduce_writer
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.shard_writer import write_shard
from tierfs.dcp.save.staged_state import UnstagedState
from tierfs.dcp.save.streaming import say_waves
from tierfs.dcp.stager import stage
from tierfs.dcp.torch_format.layout import SUFFIX, write_archives
from tierfs.device.drain import Gate
from tierfs.errors import CapacityError, InvalidInputError
from tierfs.format.checkpoint import SaveMark
from tierfs.format.keys import inside
from tierfs.gc_pause import Uncollected
from tierfs.host.pending.levels import Level
from tierfs.store import Store, status
from tierfs.store.commit import Commits

__all__ = ["TierWriter"]

LAYOUTS = ("tierfs", "dcp")


class TierWriter(StorageWriter):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves checkpoints into a tierfs store. StorageWriter and AsyncStager in one, for all saves of a run.

    `stage` copies tensors into memory that the flusher saves from, so `write_data` moves no tensor bytes. `write_data`
    itself copies a state that was not staged (``dcp.save``). Picklable, without its saves: it keeps which of them are under way, which one
    ended last, and which tensors other ranks saved.

    Args:
        path: The checkpoint's directory: a URL as for `Address`. DCP's ``checkpoint_id`` takes its place.
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
        ForkingPickler.register(cls, reduce_writer)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_address", "_is_stock", "_overwrite", "_stage_options")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_token": "", **state}, _replicas=None)
        self._gpu = GpuStaging(*self._stage_options)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._save = ThreadSave()
        self._saves = Saves(self, self._save)

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
        save = self._saves.ask()
        try:
            store, _ = self._address.open(write=True)
            with Uncollected():  # a collection looks at all that torch has; 10,000 tensors set one off
                return self._staged(store, state_dict, save)
        except Exception as error:
            if not others_wait():
                raise
            return UnstagedState(save, error)

    def _staged(self, store: Store, state_dict: dict[str, Any], save: Save) -> dict[str, Any]:
        delegated = self._replicas.take(save) if self._replicas is not None else {}
        if not self._is_stock:  # what that writes goes through the ram tier once more, so the copy may not take it up
            file = ShardFile(store, self._gpu, save=save)
            try:
                return stage(state_dict, file, delegated)
            except BaseException as error:
                file.abort()  # the waves need its room
                if not isinstance(error, CapacityError):
                    raise
                say_waves(store, error)
        return stage(state_dict, ShardFile(store, self._gpu, private=True, save=save), delegated)

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

    def storage_meta(self) -> StorageMeta:
        """Where the save that begins goes, and its id, for planners. As with torch's writers, the coordinator's id is the save's."""
        self._save.save_id = secrets.token_hex(16)
        return StorageMeta(checkpoint_id=self._here.url, save_id=self._save.save_id)

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
            Exception: The reason why this rank's state was not staged.
            InvalidInputError: torch's planner would fail at a tensor's dtype without its name.
        """
        if (failure := self._save.failure) is not None:
            self._save.failure = None
            raise failure
        checks.check_plannable(plan.items)
        self._save.offered = plan.items if plan.usable else None
        ours, self._save.delegated = split(plan.items)
        return replace(plan, items=ours, storage_data=Delegated(self._save.delegated)) if self._save.delegated else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are, if every tensor that ranks left to each other is in one of them. Called on the coordinator alone.

        Raises:
            AlreadyExistsError: There is a checkpoint, and it may not be replaced; or it would be loaded in place of this one.
            InvalidInputError: A tensor is in none.
        """
        store, path = self._here.open(write=True)
        metadata_path = inside(path, self._save.metadata_name)
        checks.check_free(
            store, self._here.url, path, metadata_path, overwrite=self._overwrite, together=self._save.use_collectives
        )
        if all(plan.usable for plan in plans):  # else they are only what has changed, and `finish` sees the rest
            checks.check_owners(
                self._here.url,
                (item.index for plan in plans for item in plan.items),
                (index for plan in plans for index in delegated_by(plan)),
            )
        save_id, self._save.save_id = self._save.save_id or secrets.token_hex(16), ""
        self._save.mark, self._save.is_new = Commits(store).begin(metadata_path, save_id)
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
        results = [WriteResult(index, 0, None) for index in self._save.delegated or delegated_by(plan)]
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        checks.check_planned(items)
        save = self._saves.go_on()
        if self._replicas is not None:
            has_delegated = bool(self._save.delegated) or self._save.offered is None
            self._replicas.learn(save, self._save.offered, plan.items, has_delegated=has_delegated)
        results += self._write(store, path, items) if items else []
        save.metadata_path = inside(path, self._save.metadata_name)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, store: Store, path: str, items: Sequence[tuple[WriteItem, Any]]) -> list[WriteResult]:
        rank, unique = self._save.rank_here, secrets.token_hex(4)
        if self._is_stock:
            checks.check_archived(items)
            name = f"__{rank}_{unique}{SUFFIX}"
            length, begins, sizes = write_archives(store, inside(path, name), [data for _, data in items])
        else:
            name = f"rank-{rank:05d}-{unique}.safetensors"
            checks.check_objects(items)
            length, begins, sizes = write_shard(store, inside(path, name), items, self._gpu, self._saves.go_on())
        host = publish.host_of(store)
        return [
            WriteResult(item.index, size, (BytesPlace(name, begin, size), length, host))
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
        parts = publish.Parts.of(result for rank in results for result in rank)
        checks.check_owners(self._here.url, parts.places, (result.index for rank in results for result in rank))
        metadata_path, mark = inside(path, self._save.metadata_name), self._save.mark
        assert mark is not None, "prepare_global_plan comes first"
        checkpoint = publish.Publication(store, self._here.url, path, metadata_path, mark, is_new=self._save.is_new)
        (publish.publish_archives if self._is_stock else publish.publish_shards)(checkpoint, metadata, parts)
        # DCP returns it, to another process where that had us save.
        metadata.storage_meta = SavedMeta(
            self._here.url, mark.save_id, metadata_path=metadata_path, sequence=mark.sequence
        )
        self._saves.go_on().end(metadata_path, mark)

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
        """Wait until the last save has reached a level.

        Call it when the last save is done, as its future says: until then its outcome is open. If saves overlap,
        the last is the one whose `stage` was called last, or that began last without; the others may be under way still.

        Below ``"object"`` this concerns this host's part; at ``"object"`` the whole checkpoint.

        Raises:
            TimeoutError: It has not, in time; names what is missing.
            NotFoundError: The last save has not come to its end on this rank; or it failed, on whichever rank, or was removed.
            ConflictError: The last save was superseded by one that began later.
            TierfsError: The reason why it cannot get there.
        """
        publish.wait_for(*self._asked(), Level.parse(level), timeout)

    def ack(self) -> str:
        """The level that the checkpoint where the last save went has reached, as seen from this host.

        Raises:
            NotFoundError: There is none, or as `wait` does.
        """
        return publish.level_reached(*self._asked()).label

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

    def _asked(self) -> tuple[Store, str, str, SaveMark | None]:
        """Where the save that was asked for last went, the path of its metadata, and which one it is; ``None`` where there was none.

        Raises:
            NotFoundError: It has not come to its end.
        """
        save = self._saves.settled(self._address.url)
        store, path = ((save.address if save is not None else None) or self._address).open()
        if save is None:
            return store, path, inside(path, metadata_file()), None
        return store, path, save.metadata_path, save.mark


ForkingPickler.register(TierWriter, reduce_writer)
