"""`TierWriter`: save a torch.distributed.checkpoint as one shard file per rank, then publish its ``.metadata``."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as StagingFuture
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierfs.dcp.address import Address
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.save import checks, publish
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.plan import sizes_of
from tierfs.dcp.save.replicas import Replicas, delegated_by, share_sizes, split
from tierfs.dcp.save.saves import (
    OwnPlan,
    OwnResults,
    Save,
    SavedMeta,
    Saves,
    StagedState,
    broadcast_nothing,
    forget_read,
    note_stored,
)
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.shard_writer import write_shard
from tierfs.dcp.save.state_plan import StatePlan
from tierfs.dcp.stager import stage
from tierfs.device.drain import Gate
from tierfs.errors import InvalidInputError
from tierfs.format.checkpoint import SaveMark, metadata_file
from tierfs.format.keys import inside
from tierfs.gc_pause import LINGER_S, Uncollected, detached, planning
from tierfs.host.pending.levels import Level
from tierfs.session.settings import ranks_here
from tierfs.store import Store, status
from tierfs.store.commit import Commits

YIELD_S = 0.001


class _WriterThread(threading.local):
    """The progress of one writer on one thread.

    Attributes:
        address: The address of the next save, if `TierWriter.reset` gave one.
        save_id: The id that this rank proposes for the next save.
        save: The save that runs or last ran.
        planning: The pause of garbage collection while DCP plans, and this rank writes its file.
    """

    address: Address | None = None
    save_id: str = ""
    save: Save | None = None
    planning: Uncollected | None = None

    def end_planning(self) -> None:
        if self.planning is not None:
            self.planning.end()


class TierWriter(StorageWriter):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves checkpoints into a tierfs store. It is a `StorageWriter` and an `AsyncStager`, for all saves of a run.

    `stage` copies tensors into memory from which the flusher saves them, so `write_data` moves no tensor bytes. A state
    that was not staged (``dcp.save``) is copied by `write_data`.

    A writer can be pickled. The pickle holds its address and options. It does not hold the state of saves: which of
    them are in flight, which one finished last, and which tensors other ranks saved.

    ``single_file_per_rank``, ``sync_files``, ``thread_count``, ``per_thread_copy_ahead``,
    ``cache_staged_state_dict`` and ``serialization_format`` are accepted as for ``FileSystemWriter`` and ignored.
    Each rank always writes one file.

    Args:
        path: The checkpoint's directory: ``tierfs::s3://bucket/run/step_10``, ``tierfs://NAME/run/step_10``, the object
            tier's own URL, or a local path. DCP's ``checkpoint_id`` takes its place.
        overwrite: Whether a save may replace a checkpoint. The old checkpoint can be loaded until the new one is
            complete. If false, such a save raises `AlreadyExistsError`.
        _extensions: Transformations of streams. They are not supported.
        ack: The level at which a save returns; ``None`` takes the configured level. If the ranks run on several hosts,
            the checkpoint can be loaded once every part is in the object tier, whatever the level.
        stage: How `stage` copies tensors, so that training may change them.

            - ``"auto"``: into the device tier if that has a budget, else into the ram tier.
            - ``"device"``: the same, but without a GPU or a budget it is an error.
            - ``"lazy"``: large tensors on a GPU are read in place while training computes. Every torch optimizer
              waits for these reads before its ``step``. For other code see `fence`. Without a GPU it is an error.
            - ``"ram"``: into the ram tier.
            - ``"all"``: as ``"auto"``, and each rank copies all tensors that it has.

            With any other value, one rank alone copies a tensor that several ranks have, from the writer's second save
            on.
        device: The budget of GPU memory for the device tier, such as ``"8GiB"``; ``None`` takes the configured one, by
            default none. If it holds twice the rank's state, a save can begin while the previous save drains.
        **options: ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``, ``codecs`` and ``create`` as for the
            filesystem, and options for the object tier's filesystem by its protocol, such as ``s3={...}``.

    Attributes:
        facts: ``kind`` and ``run`` for the metadata of the next save. the manager of a training run sets them.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    facts: Mapping[str, str] = {}

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
        ack: str | None = "staged",
        stage: str = "auto",
        device: str | int | None = None,
        **options: Any,
    ) -> None:
        if _extensions:
            raise InvalidInputError("TierWriter takes no _extensions: the store encodes the data")
        if "layout" in options:
            raise InvalidInputError(
                "TierWriter has one layout: `tierfs checkpoint export` writes what torch's readers read"
            )
        self._gpu = GpuStaging(stage, device)
        self._stage_options = stage, device
        self._address = Address.of(path, {**options, "ack": ack})
        self._overwrite = overwrite
        self._replicas = Replicas() if stage != "all" else None
        self._begin_anew()
        self._address.open_ahead(self._saves.begun)

    def __repr__(self) -> str:
        return f"TierWriter({self._address.url!r}, ack={self._address.tiers.ack!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_address", "_overwrite", "_stage_options")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _replicas=None)
        self._gpu = GpuStaging(*self._stage_options)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._here = _WriterThread()
        self._saves = Saves()
        self._plan: StatePlan | None = None  # of the last state that was staged
        self._staged_on: int | None = None  # id of the thread that called `stage` last

    @property
    def running(self) -> Save:
        """The save that runs on this thread. For subclasses."""
        save = self._here.save
        assert save is not None, "set_up_storage_writer comes first"
        return save

    @property
    def checkpoint_id(self) -> str:
        """The URL of the directory that the last requested save goes to."""
        return self._address.url

    @property
    def save_id(self) -> str | None:
        """The random id of the last finished save, as its metadata names it; ``None`` before the first one finishes."""
        done = self._saves.done
        return None if done is None or done.mark is None else done.mark.save_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id begins with ``tierfs:``. Nothing is looked up."""
        return os.fspath(checkpoint_id).startswith("tierfs:")

    def prepare(self, state_dict: Any) -> None:
        """Begin to make memory for two saves of a state, so that the first saves need not wait for it.

        Call it once before training. It returns at once, and after the first save it does nothing. The memory is made at
        the lowest priority. It counts against the ram tier's budget, at most with this rank's share, and is released
        when another process waits for room. Errors are left to the save.

        Args:
            state_dict: A state dict; or modules, optimizers and tensors in dicts, lists and tuples. An optimizer counts
                with the state that its first step makes. Only sizes are read.
        """
        self._prepare(*sizes_of(state_dict))

    def _prepare(self, size: int, longest: int) -> None:
        """Do the same for a state of which `sizes_of` returned this."""

        def begin(store: Store) -> None:
            if store.tiers is not None:
                store.tiers.writer.prepare(size, longest, store.tiers.ram.budget_bytes // ranks_here())

        self._address.open_ahead(self._saves.begun, begin)

    # -- AsyncStager ---------------------------------------------------------------------------------------------------

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: staging is complete when `stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture[dict[str, Any]]:
        """Copy a state dict, so that training may change the original: see `tierfs.dcp.stager.stage`.

        If the copy fails while other ranks wait for this one to plan, this method returns without an error. The save
        then fails on every rank when it is planned.
        """
        self._staged_on = threading.get_ident()
        save = self._saves.ask()
        try:
            # `write_data` checks the store: training does not wait here for the object tier.
            store, _ = self._address.open(write=True, is_checked=False)
            with Uncollected():  # 10,000 new tensors trigger a full collection, which scans all of torch's objects
                return self._staged(store, state_dict, save)
        except Exception as error:
            if not others_wait():
                raise
            save.failure = detached(error)
            return StagedState(lambda _: {}, (), save, None)

    def _staged(self, store: Store, state_dict: dict[str, Any], save: Save) -> dict[str, Any]:
        if self._replicas is not None:
            save.taken = self._replicas.take()
        file = ShardFile(store, self._gpu)
        try:
            staged, self._plan = stage(state_dict, file, save, self._plan)
        except BaseException:
            file.abort()  # the next save needs its memory
            raise
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: staging is complete when `stage` returns."""

    def close(self) -> None:
        """Begin nothing more ahead of the first save. Saves go on, and later saves are possible."""
        self._saves.begun.set()

    # -- StorageWriter -------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to another directory if one is given. The options stay the same.

        DCP runs each save on one thread, and concurrent saves on several. So each thread has an address of its own.
        """
        if checkpoint_id is not None:
            self._here.address = self._address = self._address.at(checkpoint_id)
            forget_read()
        if self._staged_on not in {None, threading.get_ident()}:
            # `async_save` returns once this thread runs, and then waits for the GIL, which this thread holds. Yielding
            # it here lets training continue after 8 instead of 12 ms with 900 small tensors (integration/bench/dcp.py).
            self._staged_on = None
            time.sleep(YIELD_S)

    def storage_meta(self) -> StorageMeta:
        """Return the directory and a new random id of the save that begins.

        As with torch's writers, the coordinator's id becomes the id of the save.
        """
        self._here.save_id = secrets.token_hex(16)
        return StorageMeta(checkpoint_id=(self._here.address or self._address).url, save_id=self._here.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record this rank's role and the address of its save.

        Another save may change the writer's address before this one ends.
        """
        here = self._here
        here.end_planning()
        here.planning = planning(LINGER_S)
        save = here.save = self._saves.begin()
        save.address, here.address = here.address or self._address, None
        save.save_id, here.save_id = here.save_id or secrets.token_hex(16), ""
        rank = kwargs.get("rank")
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        save.rank, save.use_collectives = rank, kwargs.get("use_collectives", True)
        save.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan without the tensors that another rank saves. This makes no request to the store.

        Raises:
            Exception: This rank's state was not staged, for this reason.
            InvalidInputError: torch's planner does not know the dtype of a tensor. It would fail without its name.
        """
        save = self.running
        if (failure := save.failure) is not None:
            save.failure = None
            raise failure
        checks.check_plannable(plan.items)
        save.offered = plan.items if plan.usable else None
        ours, save.delegated = split(plan.items)
        if save.delegated:
            plan = replace(plan, items=ours, storage_data=save.delegated)
        if others_wait():
            share_sizes(plan.items)
        return OwnPlan(**vars(plan)) if save.is_coordinator and type(plan) is SavePlan else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that some rank saves each tensor, and return the same plans. Called on the coordinator alone.

        Raises:
            AlreadyExistsError: A checkpoint is there and may not be replaced, or a load would find it instead of the
                new one.
            InvalidInputError: No plan holds a tensor that a rank left to others.
        """
        save = self.running
        store, path = save.target.open(write=True)
        metadata_path = inside(path, save.metadata_name)
        checks.check_free(
            store, save.target.url, path, metadata_path, overwrite=self._overwrite, together=save.use_collectives
        )
        if all(plan.usable for plan in plans):  # otherwise plans list changed items only; `finish` checks all items
            checks.check_owners(
                save.target.url,
                (item.index for plan in plans for item in plan.items),
                (index for plan in plans for index in delegated_by(plan)),
            )
        save.planned, save.is_new = Commits(store).begin(metadata_path, save.save_id, overwrite=self._overwrite)
        # DCP's coordinator is the first rank. A planner may have made other ranks' plans from that of the coordinator.
        return [
            (SavePlan if number else OwnPlan)(**vars(plan)) if type(plan) in {SavePlan, OwnPlan} else plan
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items as one file.

        Raises:
            StoreError, CapacityError, ConflictError, TimeoutError: The file could not be saved.
            InvalidInputError: A tensor has no elements to store, or an object could not be loaded again. The message
                names it.
        """
        with self._here.planning or nullcontext():
            save = self.running
            store, path = save.target.open(write=True)
            # This rank does not store these items. The coordinator checks that another rank does.
            results = [WriteResult(index, 0, None) for index in save.delegated or delegated_by(plan)]
            with torch.no_grad():  # otherwise `to_local` of a DTensor records a function for autograd
                items = [(item, planner.resolve_data(item)) for item in plan.items]
            checks.check_planned(items)
            if self._replicas is not None:
                has_delegated = bool(save.delegated) or save.offered is None
                self._replicas.learn(save.taken, save.offered, plan.items, has_delegated=has_delegated)
            results += self._write(store, path, items, save) if items else []
            save.metadata_path = inside(path, save.metadata_name)
            note_stored(save)
        future: Future[list[WriteResult]] = Future()
        future.set_result(OwnResults(results) if save.is_coordinator else results)
        return future

    def _write(self, store: Store, path: str, items: Sequence[tuple[WriteItem, Any]], save: Save) -> list[WriteResult]:
        name = f"rank-{save.rank:05d}-{secrets.token_hex(4)}.safetensors"
        checks.check_objects(items)
        length, begins, sizes = write_shard(store, inside(path, name), items, self._gpu, save)
        host = publish.host_of(store)
        return [
            WriteResult(item.index, size, (BytesPlace(name, begin, size), length, host))
            for (item, _), begin, size in zip(items, begins, sizes, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. Called when every rank has saved its file.

        If the ranks run on several hosts and the level is below ``"object"``, this announces the checkpoint instead.
        It is then published when all parts are in the object tier.

        Raises:
            StoreError, CapacityError, TimeoutError: The checkpoint could not be published.
            InvalidInputError: No rank saved a tensor that ranks left to each other.
            ConflictError: Another save to the same directory is published, which this one did not see when it began.
        """
        save = self.running
        store, path = save.target.open(write=True)
        metadata.version = filesystem.CURRENT_DCP_VERSION  # written and, as with torch's writers, returned
        vars(metadata).pop("__reduce_ex__", None)  # a planner may keep the object of a save that was interrupted
        save.metadata_path = inside(path, save.metadata_name)
        stored = [result for rank in results for result in rank]
        with planning(LINGER_S):
            mark = publish.publish_checkpoint(store, path, save, metadata, stored, self.facts)
        # DCP sends this object to the other ranks, whose writers learn from it that the save finished.
        metadata.storage_meta = SavedMeta(
            save.target.url, mark.save_id, metadata_path=save.metadata_path, sequence=mark.sequence
        )
        broadcast_nothing(metadata, results)
        save.end(mark)

    # -- levels --------------------------------------------------------------------------------------------------------

    def wait(self, level: str = "object", timeout: float | None = None) -> None:
        """Wait until the last save has reached a level.

        Call it when the future of the last save is done: until then the outcome of that save is open. If saves
        overlap, the last one is the one whose `stage` was called last. Without `stage` it is the one that began last.
        Earlier saves may still be in flight.

        Args:
            level: Below ``"object"`` this concerns the part of this host; at ``"object"``, the whole checkpoint.
            timeout: In seconds; ``None`` waits without a limit.

        Raises:
            TimeoutError: The level was not reached in time. The message names the missing parts.
            NotFoundError: The last save has not finished on this rank, it failed on some rank, or it was removed.
            ConflictError: Another save to the same directory is published instead of the last one.
            TierfsError: The save cannot reach the level, for this reason.
        """
        publish.wait_for(*self._asked(), Level.parse(level), timeout)

    def ack(self) -> str:
        """Return the level that the last save has reached, as seen from this host; ``none`` if it was superseded.

        Raises:
            NotFoundError: No checkpoint is there, or the last save has not finished on this rank.
        """
        return publish.level_reached(*self._asked()).label

    def status(self) -> dict[str, Any]:
        """Return the status of the store, as ``tierfs status --json`` shows it, with this writer's device tier."""
        store = self._address.open()[0]
        report = status(store)
        device = self._gpu.status(store)
        if device is not None:
            report["tiers"]["device"] = device
        return report

    def fence(self) -> None:
        """Make later work on the current stream wait for saves that read tensors in place (``stage="lazy"``).

        torch's optimizers do this before every ``step``. Call it before other code that changes tensors that are being
        saved: a replay of a CUDA graph that holds the optimizer's step, or an optimizer that is not torch's. It blocks
        until the copies are queued. With any other ``stage`` it does nothing, as nothing has to wait.
        """
        self._gpu.fence()

    @property
    def gates(self) -> list[Gate]:
        """For each GPU in use, the `tierfs.device.Gate` that stops the drain while it is closed."""
        return self._gpu.gates

    def _asked(self) -> tuple[Store, str, str, SaveMark | None]:
        """Return the store, directory, metadata path and mark of the last requested save; no mark if there was none.

        Raises:
            NotFoundError: That save has not finished.
        """
        save = self._saves.settled(self._address.url)
        store, path = ((save.address if save is not None else None) or self._address).open()
        if save is None:
            return store, path, inside(path, metadata_file()), None
        return store, path, save.metadata_path, save.mark


def others_wait() -> bool:
    """Return whether other ranks wait for this one to plan."""
    return dist.is_available() and dist.is_initialized() and bool(dist.get_world_size() > 1)
