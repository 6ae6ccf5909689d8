"""`TierReader`: load checkpoints that `TierWriter` or torch's own writers saved to a store."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tierfs.dcp.address import Address, full_url
from tierfs.dcp.checkpoint import read_checkpoint
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.load.coverage import mark_absent
from tierfs.dcp.load.gpu_chunks import roll_back
from tierfs.dcp.load.shards import ShardFiles
from tierfs.dcp.torch_format.data import read_items
from tierfs.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.format.checkpoint import ROOT, metadata_file
from tierfs.format.keys import inside
from tierfs.gc_pause import planning
from tierfs.session import parse_url
from tierfs.store import Store, stat
from tierfs.store.announced_saves import AnnouncedSaves, Waiting
from tierfs.store.commit import Commits
from tierfs.store.offline import ask_briefly

LOAD_ID_BYTES = 16
_logger = logging.getLogger("tierfs.dcp")


class _Unreadable:
    """Stands for metadata that could not be read: torch's loader catches the error of `read_metadata` and goes on."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def __getattr__(self, name: str) -> Any:
        raise self.failure


class TierReader(StorageReader):  # type: ignore[misc]  # torch's classes are untyped here
    """Loads checkpoints from a store. It reads only the requested rows, where possible straight into their tensors.

    Nothing is opened before `read_metadata`. All bytes that tierfs stored are verified. For files that ``torch.save``
    wrote past tierfs, the checksums in their archives are compared. An error names the tensor, the shard file and the
    tier.

    Attributes:
        device_bytes: The number of bytes that were copied from snapshots in the device tier so far.
        load_id: A random id, drawn anew by `reset`. As with torch's readers, `read_metadata` returns it in the
            metadata.

    Args:
        path: The checkpoint's directory: ``tierfs::s3://bucket/run/step_10``, ``tierfs://NAME/run/step_10``, the object
            tier's own URL, or a local path.
        **options: ``ack``, ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``, ``codecs`` and ``create`` as
            for the filesystem, and options for the object tier's filesystem by its protocol, such as ``s3={...}``.

    Raises:
        InvalidInputError: The URL or an option is invalid.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._address = Address.of(path, options)
        self.load_id = secrets.token_hex(LOAD_ID_BYTES)
        self._metadata: Any = None
        self._rank: int | None = None
        self._failure: Exception | None = None
        self._note: CheckpointNote | None = None
        self._shared: str | None = None
        self.device_bytes = 0
        self._planning: AbstractContextManager[None] = nullcontext()

    def __repr__(self) -> str:
        return f"TierReader({self._address.url!r})"

    @property
    def checkpoint_id(self) -> str:
        """The URL of the checkpoint that is read."""
        return self._address.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id is a valid URL or path. Nothing is looked up."""
        try:
            parse_url(full_url(checkpoint_id))
        except InvalidInputError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another checkpoint if one is given. The options stay the same.

        Raises:
            InvalidInputError: The URL is invalid.
        """
        if checkpoint_id:
            parse_url(full_url(checkpoint_id))
            self._address = self._address.at(checkpoint_id)
        self.load_id = secrets.token_hex(LOAD_ID_BYTES)
        self._metadata = self._note = self._shared = self._failure = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's `Metadata` of the checkpoint.

        torch's loader calls this without ``rank``. After any error it ignores the reason and calls again with
        ``rank``. If that call fails as well, this method returns an object that raises the reason at its first use.

        Args:
            *args: Ignored.
            **kwargs: ``rank`` selects the metadata that one rank saved without collectives.

        Raises:
            NotFoundError: No checkpoint is there.
            ConflictError: ``rank`` is given, but all ranks have saved together to the same directory.
            CorruptionError, FormatError: The metadata is damaged, or of an unsupported version.
            InvalidInputError: The metadata is a pickle that holds more than torch's metadata.
            TierfsError: The read failed.
        """
        rank, first = kwargs.get("rank"), self._failure
        self._failure = None
        try:
            return self._read_metadata(rank)
        except Exception as error:
            if rank is None:
                self._failure = error
                raise
            if first is None:
                raise
            is_there = isinstance(first, NotFoundError) and not isinstance(error, NotFoundError)
            return _Unreadable(error if is_there else first)

    def _read_metadata(self, rank: int | None) -> Any:
        store, directory = self._address.open()
        name = metadata_file(rank)
        path = inside(directory, name)
        where = store.where(path)
        if name != ROOT:
            self._check_root_is_absent(store, directory, path)
        waiting = self._commit(store, directory) if name == ROOT else []
        try:
            found = read_checkpoint(store, path, directory, rank)
        except NotFoundError as error:
            why = "; ".join(map(str, waiting)) or "an unfinished save has none"
            raise NotFoundError(
                f"no checkpoint is at {self.checkpoint_id}: {where} does not exist; {why}; see `tierfs checkpoint ls {shlex.quote(str(self.checkpoint_id))}`",
                path=path,
            ) from error
        for save in (each for each in waiting if found.note is None or each.mark.save_id != found.note.save_id):
            _logger.warning("%s: a later save is incomplete and is not loaded: %s", self.checkpoint_id, save)
        self._rank = rank
        self._note = note = found.note
        self._shared = note.save_id if note is not None and name == ROOT else None
        metadata = mark_absent(found.metadata)
        meta = metadata.storage_meta or StorageMeta()
        return replace(metadata, storage_meta=replace(meta, load_id=self.load_id))

    def _commit(self, store: Store, directory: str) -> list[Waiting]:
        """Publish an announced save whose last file has arrived, and return the saves that have to wait."""
        try:
            if store.tiers is not None and not ask_briefly(store, lambda: AnnouncedSaves(store).is_any(directory)):
                return []
            return Commits(store).advance(directory)
        except TierfsError as error:
            # The published checkpoint can still be loaded, for example from this host's tiers.
            _logger.warning(
                "%s: cannot check for a later save, so an earlier one may be loaded: %s", self.checkpoint_id, error
            )
            return []

    def _check_root_is_absent(self, store: Store, directory: str, path: str) -> None:
        root = inside(directory, ROOT)
        try:
            stat(store, root) if store.tiers is None else ask_briefly(store, partial(stat, store, root))
        except NotFoundError:
            return
        except StoreError as error:
            # A save without collectives is refused where all ranks have saved together. So if this host has such a save
            # pending, no checkpoint of all ranks was there.
            if error.transient and store.tiers is not None and store.tiers.drafts.pending(path) is not None:
                return
            raise
        raise ConflictError(
            f"{store.where(path)} was saved by one rank on its own, but {ROOT} beside it was saved by all ranks "
            "together and is the checkpoint: load that; if it cannot be read, run `tierfs checkpoint verify`",
            path=path,
        )

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata that `read_metadata` returned.

        Raises:
            Exception: `read_metadata` failed for this reason, and torch went on.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.failure
        self._planning = planning()
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check that every requested item was saved, and note in the plan which shared save the metadata is of.

        Raises:
            CorruptionError: The metadata does not say where an item is. No rank has loaded anything yet.
            InvalidInputError: The same, for metadata that one rank saved without collectives.
        """
        if self._metadata is not None:
            for item in plan.items:
                self._place(item.storage_index)
        return replace(plan, storage_data=self._shared)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks are about to load the same save. Called on the coordinator alone.

        Raises:
            ConflictError: Another save was published while the ranks read the metadata.
        """
        saves = {str(plan.storage_data) for plan in plans}
        if len(saves) > 1:
            raise ConflictError(
                f"{self.checkpoint_id} was saved again while it was being loaded: the ranks read metadata of "
                f"{len(saves)} saves, {', '.join(sorted(saves))}; load it again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan on this thread, and pass them to the planner.

        Raises:
            CorruptionError: Stored bytes are wrong or missing. Items that were loaded before stay in place.
            TierfsError: The read failed.
        """
        pause, self._planning = self._planning, nullcontext()
        with pause:
            store, directory = self._address.open()
            lengths = {} if self._note is None else self._note.files
            files = ShardFiles(store, directory, lengths)
            wanted = self._wanted(plan)
            if self._note is not None:
                wanted, count = roll_back(self._note.save_id, wanted, planner)
                self.device_bytes += count
            files.open(saved.place.file for _, saved in wanted)
            read_items(files, wanted, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(self, plan: LoadPlan) -> list[tuple[Any, SavedItem]]:
        """Return each item of a plan with the saved chunk or object that it reads."""
        if self._metadata is None:
            raise InvalidInputError("set_up_storage_reader has to be called before read_data")
        shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        found = []
        for item in plan.items:
            fqn = item.storage_index.fqn
            place = self._place(item.storage_index)
            described = self._metadata.state_dict_metadata.get(fqn)
            if item.type == LoadItemType.BYTE_IO:
                found.append((item, SavedItem(place)))
                continue
            if fqn not in shapes and isinstance(described, TensorStorageMetadata):
                shapes[fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks}
            shape = shapes.get(fqn, {}).get(tuple(item.storage_index.offset or ()))
            if shape is None:
                raise self._not_said(item.storage_index)
            found.append((item, SavedItem(place, described.properties.dtype, shape)))
        return found

    def _place(self, index: Any) -> BytesPlace:
        """Return the place of a chunk or an object."""
        place = self._metadata.storage_data.get(index)
        if isinstance(place, str) and self._rank is not None:
            raise InvalidInputError(
                f"{self.checkpoint_id}: {index.fqn!r}: {place}: rank {self._rank} saved only its own part; load "
                "with as many ranks as saved and use_collectives=False"
            )
        if isinstance(place, str):  # see `mark_absent`
            raise CorruptionError(
                f"{self.checkpoint_id}: {index.fqn!r} cannot be loaded: {place}; the state is unchanged; `tierfs "
                "checkpoint verify` names every damaged tensor"
            )
        if not isinstance(place, BytesPlace):
            raise self._not_said(index)
        return place

    def _not_said(self, index: Any) -> CorruptionError:
        at = "" if index.offset is None else f" at {list(index.offset)}"
        return CorruptionError(f"{self.checkpoint_id}: the metadata does not say where {index.fqn!r}{at} is")
