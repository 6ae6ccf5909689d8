"""The logs of steps in shared memory, one for each run on this host.

A log is a store of its own. Its object tier is empty, and its ram tier has a state directory in that of the host, and
memory of its own. No flusher takes drafts out of it: a file stays until `remove_files` or a restart of the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, NotFoundError, ReadOnlyError
from tierfs.host.chunk_sources import slot_at
from tierfs.host.filesystems import entries_of, make_private
from tierfs.host.host import Host, state_directory
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.pending.levels import Level
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.table import SlotState
from tierfs.host.tiers import Tiers
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store import Store, delete


class _NoFlusher(FlusherClient):
    """Takes the flusher's messages, and does nothing."""

    def is_running(self) -> bool:
        return True

    def request(
        self, do: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        del do, arguments, timeout_s
        return {}


def open_log(store: Store, run: str, *, budget_bytes: int = 0) -> Store:
    """Open the log of a run for reading, and for writing at most ``budget_bytes``. Its paths are those of ``store``.

    Frees what killed processes left unfinished. The caller closes its tiers. Raises as `Host` does.
    """
    directory = _directory(store)
    make_private(directory.parents[1])
    log = _open(store, directory / xxhash.xxh3_64_hexdigest(run.encode()), budget_bytes)
    tiers = log.tiers
    assert tiers is not None

    def needed(segment: Segment) -> set[int]:
        drafts = [item.draft for item in tiers.drafts.pending_below("").values()]
        return {
            each.index for draft in drafts for each in draft.slots if each is not None and each.segment == segment.id
        }

    if not tiers.ram.is_blind():
        tiers.ram.reclaim(needed)
    return log


def make_room(log: Store, length: int) -> None:
    """Make memory for so many bytes, as far as the budget has it. From then on, so much is made ahead of need."""
    assert log.tiers is not None
    chunks = [[CHUNK_BYTES]] * -(-length // CHUNK_BYTES)
    with contextlib.suppress(CapacityError):
        for run in log.tiers.writer.begin_runs(chunks, timeout_s=0):
            log.tiers.writer.drop(run[0].slot)


@contextlib.contextmanager
def logs_of(store: Store) -> Iterator[list[Store]]:
    """Open the logs of all runs of a store for reading, until the context ends."""
    with contextlib.ExitStack() as opened:
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(ReadOnlyError):  # another user's
            entries = entries_of(_directory(store))
        logs = [_open(store, Path(entry.path), 0) for entry in entries]
        for log in logs:
            assert log.tiers is not None
            opened.callback(log.tiers.close)
        yield logs


def lengths_below(log: Store, path: str = "") -> dict[str, int]:
    """Return the files of a log at or below a path, with their lengths in bytes."""
    assert log.tiers is not None
    return {name: item.draft.length for name, item in log.tiers.drafts.pending_below(path).items()}


def remove_files(store: Store, paths: Collection[str]) -> int:
    """Remove files of a log, of any process; or those of a store. Return their bytes.

    Those that are gone already are passed over. Raises as `delete` does.
    """
    tiers, removed = store.tiers, 0
    if tiers is None or not isinstance(tiers.flusher, _NoFlusher):
        for path in paths:
            with contextlib.suppress(NotFoundError):
                removed += delete(store, path)
        return removed
    found = {item.draft.write_id: item.draft for path in paths if (item := tiers.drafts.pending(path)) is not None}
    for slot in tiers.ram.drafts() if found else ():
        if draft := found.get(slot.name):
            removed += draft.length
            chunks = [slot_at(tiers.ram, reference) for reference in draft.slots if reference is not None]
            for each in [slot, *filter(None, chunks)]:  # the draft first, so that no reader sees one without chunks
                if each.segment.owned:
                    each.segment.give(each)
                else:
                    each.segment.mark(each, SlotState.CLEAN)
    return removed


def _directory(store: Store) -> Path:
    return (store.state_dir or state_directory()) / "logs" / store.descriptor.uuid


def _open(store: Store, directory: Path, budget_bytes: int) -> Store:
    host, uuid, kind = Host(directory), store.descriptor.uuid, store.descriptor.digest_kind
    here = host.store_directory(uuid)
    tiers = Tiers(
        RamTier(host, uuid, budget_bytes=budget_bytes, clock=store.clock),
        NvmeReader(here),
        _NoFlusher(here, lambda: None, "", dict),
        kind=kind,
        has_nvme=False,
        gives_local=False,
        keeps_reads=False,
        passes_by=False,
        clock=store.clock,
    )
    empty = MemoryObjects("tierfs-logs-of-steps")
    return Store(
        empty, store.descriptor, url=store.url, clock=store.clock, tiers=tiers, ack=Level.STAGED, state_dir=directory
    )
