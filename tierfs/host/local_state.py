"""This host's state of a store: the store that it belongs to, its directory and its segments. List it, and remove it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tierfs.checked_json import parse_value
from tierfs.clock import SystemClock
from tierfs.errors import CapacityError, InvalidInputError, NotFoundError, ReadOnlyError, StoreError, TierfsError
from tierfs.format.keys import DESCRIPTOR
from tierfs.host.filesystems import entries_of, flush_directory, open_lock_file, refused
from tierfs.host.host import ExclusiveLock, Host
from tierfs.host.nvme.head import TIER
from tierfs.host.rpc.client import is_flusher_running
from tierfs.host.rpc.protocol import LOCK_NAME

PLACE_FILE = "place.json"
USE_FILE = "use.lock"
"""File of a store's directory that each process with its local tiers open holds a shared lock on."""
LOCK = "forgotten"
"""Name of the host's lock on what is being removed: directories in the state directory, with this prefix."""
_NAMED_MAX = 3
_SECTOR_BYTES = 512
_logger = logging.getLogger("tierfs.local")


class DamagedPlaceError(StoreError):
    """The file that says which store the local tiers belong to cannot be read."""


def claim(host: Host, uuid: str, places: Sequence[str], url: str) -> Path:
    """Return the directory of a store's local tiers, if they belong to the store at these places.

    Pending changes must reach the store that they were saved to. The first store of an id that is opened on a host gets
    the local tiers. For the places see `ObjectTier.places`.

    Raises:
        InvalidInputError: They belong to another store.
        DamagedPlaceError: The recorded places cannot be read.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
    """
    directory = host.store_directory(uuid)
    path, names = directory / PLACE_FILE, list(places)
    if places_in(path) == names:
        return directory
    with host.locked("places"):
        is_known = check(directory, names, url)
        try:
            _record(path, names)  # one of the names matched, and the others may have changed
        except (StoreError, CapacityError, ReadOnlyError) as error:
            if not is_known:
                raise
            _logger.warning("the new location of %s cannot be recorded: %s", url, error)
    return directory


def use(directory: Path) -> int | None:
    """Keep `tierfs.host.local_state.forget` from removing a store's directory.

    Returns:
        The descriptor to close at the end; None if the directory has just been removed.

    Raises:
        ReadOnlyError, CapacityError, StoreError: The lock file cannot be opened.
    """
    path = directory / USE_FILE
    try:
        fd = open_lock_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(error, path, "cannot be locked") from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    os.close(fd)
    return None


def check(directory: Path, places: Sequence[str], url: str) -> bool:
    """Check that local tiers belong to the store at these places, without recording them. Raises as `claim` does.

    Returns whether a place is recorded.
    """
    path = directory / PLACE_FILE
    known = places_in(path)
    if known and set(places).isdisjoint(known):
        raise InvalidInputError(
            f"{url} has the id of a store that this host has local tiers for, but is at {places[0]}, not at "
            f"{known[0]}. A copy needs a state directory of its own (state_dir=, --state-dir), or no local tiers "
            "(ram=0, nvme=0); if it is the same store under another name, or was moved permanently, stop its flusher "
            f"and remove {path}",
            path=url,
        )
    return bool(known)


def places_in(path: Path) -> list[str]:
    """Return the recorded places of the store that the local tiers belong to; an empty list if there is no record.

    Raises:
        DamagedPlaceError: The record cannot be read.
    """
    try:
        text = path.read_bytes()
        kept = parse_value(text, str(path)) if text else []
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ValueError("not a list of names")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DamagedPlaceError(
            f"{path} does not say which store these local tiers belong to ({error}): changes pending in them are "
            "neither read nor flushed until this file is removed; then the tiers belong to the next store with this "
            "id that is opened",
            path=str(path),
        ) from error
    return kept


def _record(path: Path, names: list[str]) -> None:
    temporary = path.with_suffix(".new")  # no other process writes it: the lock is held
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(names))
            file.flush()
            os.fsync(file.fileno())  # pending changes survive a power failure of the host, so this record must, too
        temporary.replace(path)
        flush_directory(path.parent)
    except OSError as error:
        raise refused(error, path, "cannot be written") from error


class LocalStore(NamedTuple):
    """A store that has local tiers on this host.

    Attributes:
        uuid: The store's id.
        place: Location of the store: a local path, or an endpoint and a bucket.
        is_pending: Whether this host has changes that the object tier lacks, as far as that is known.
        has_flusher: Whether the store's flusher is running on this host.
        disk_bytes: Size of the nvme tier's files; 0 if there are none.
        is_gone: Whether the store was in a local directory where it is no longer, or another store took its place.
    """

    uuid: str
    place: str
    is_pending: bool
    has_flusher: bool
    disk_bytes: int
    is_gone: bool = False


def local_stores(state: Path) -> list[LocalStore]:
    """Return each store that has a folder with a ``place.json`` in the state directory, pending ones first.

    Of several stores at one place, all but the one that was opened last are gone. Raises as `entries_of` does.
    """
    found: list[LocalStore] = []
    taken: set[str] = set()
    files = (Path(folder.path, PLACE_FILE) for folder in entries_of(state / "stores"))
    for kept in sorted(filter(Path.exists, files), key=_changed_ns, reverse=True):
        folder = kept.parent
        try:
            places = places_in(kept)
        except StoreError:
            places = []
        place = places[0].removeprefix("file:") if places else "unknown: place.json is damaged"
        is_gone = place in taken or (place.startswith("/") and _has_left(Path(place), folder.name))
        if places and not is_gone:
            taken.add(place)
        size = _bytes_below(folder / TIER, as_allocated=False)
        running = is_flusher_running(folder)
        found.append(LocalStore(folder.name, place, is_pending(state, folder), running, size, is_gone))
    return sorted(found, key=lambda store: (not store.is_pending, not store.has_flusher, store.place))


def is_pending(state: Path, directory: Path) -> bool:
    """Return whether changes are pending, as far as that can be looked up. If not, assume that they are."""
    from tierfs.host.pending.scan import paths_pending  # noqa: PLC0415 - imports numpy, which takes a while

    try:
        return bool(paths_pending(state, directory))
    except TierfsError:
        return True  # unreadable tiers may have pending changes


def lent_places(host: Host, uuid: str) -> tuple[Path, Path]:
    """Return the directories of what a host holds for other hosts: in shared memory, and on the disk."""
    return host.segments / f"peers-{uuid}", host.store_directory(uuid) / "peers"


def _check_nothing_is_needed(host: Host, directory: Path, store: LocalStore) -> None:
    """Check that a store's directory holds no changes that the object tier lacks.

    Raises:
        StoreError: It holds changes of this host, or of others.
        TierfsError: It cannot be read, and may hold such changes.
    """
    from tierfs.host.nvme.reader import NvmeReader  # noqa: PLC0415 - imports numpy, which takes a while
    from tierfs.host.nvme.tier import has_tier  # noqa: PLC0415
    from tierfs.host.pending.scan import paths_pending  # noqa: PLC0415

    has_tier(directory)  # raises if an earlier version left changes there
    pending = paths_pending(host.directory, directory)
    if pending:
        named = ", ".join(pending[:_NAMED_MAX]) + (", ..." if len(pending) > _NAMED_MAX else "")
        back = "put the store back, then " if store.is_gone else ""
        raise StoreError(
            f"{store.place}: {len(pending)} files are pending or in conflict ({named}): {back}`tierfs wait "
            f"{shlex.quote(store.place)}` brings them down, or names the conflicts",
            path=store.place,
        )
    places = lent_places(host, store.uuid)
    held = [draft for place in places for draft in NvmeReader(place).drafts_below("", conflicts=True)]
    if held:
        raise StoreError(
            f"{store.place}: {len(held)} files of other hosts are held here: wait until `tierfs status` shows none, or "
            "run a flusher, which brings those of lost hosts down",
            path=store.place,
        )


def forget(state: Path, store: LocalStore, *, dry_run: bool) -> int:
    """Remove all that this host keeps of a store: segments, nvme tier and files of the state directory.

    The store itself is not touched. The directory leaves its place by one rename, so a killed call removed all of it or
    nothing, apart from clean copies in memory; `finish_removals` deletes the rest.

    Args:
        store: From `local_stores`.
        dry_run: Check only, and remove nothing.

    Returns:
        Bytes of disk and memory that it takes.

    Raises:
        NotFoundError: Another call has removed it.
        StoreError: A process uses it, or changes are pending. Nothing was removed.
        TierfsError: Its tiers cannot be read, and may hold pending changes; or a file cannot be removed.
    """
    from tierfs.host.slab.ram import RamTier  # noqa: PLC0415 - imports numpy, which takes a while

    host, directory = Host(state), state / "stores" / store.uuid
    with host.locked(LOCK):
        if directory.is_symlink() or not directory.is_dir():
            raise NotFoundError(f"{directory} is not there any more: nothing was removed", path=str(directory))
        with _alone(directory, store):
            _check_nothing_is_needed(host, directory, store)
            ram = RamTier(host, store.uuid, budget_bytes=0, clock=SystemClock())
            with contextlib.closing(ram):
                size = _bytes_below(directory) + ram.usage().store_bytes
                if dry_run:
                    return size
                ram.reclaim(lambda _segment: ())
                ram.reap()
                held = lent_places(host, store.uuid)[0]
                if held.exists():
                    shutil.rmtree(held)
            try:
                # No new directory: the disk may be full.
                directory.rename(state / f"{LOCK}-{store.uuid}-{secrets.token_hex(4)}")
                flush_directory(directory.parent)
            except OSError as error:
                raise refused(error, directory, "cannot be removed") from error
    finish_removals(state)
    return size


def finish_removals(state: Path) -> None:
    """Delete what calls of `forget` have taken out of its place. Raises `TierfsError` if a file cannot be removed."""
    left = [Path(entry.path) for entry in entries_of(state) if entry.name.startswith(f"{LOCK}-")]
    with Host(state).locked(LOCK) if left else contextlib.nullcontext():
        for directory in left:
            try:
                shutil.rmtree(directory)
            except FileNotFoundError:  # noqa: PERF203 - another call was faster
                continue
            except OSError as error:
                raise refused(error, directory, "cannot be removed") from error


@contextlib.contextmanager
def _alone(directory: Path, store: LocalStore) -> Iterator[None]:
    """Keep every other process out of a store's local tiers. Raises `StoreError` if one is in there."""
    stop = f"`tierfs flusher stop {shlex.quote(store.place)}` ends it"
    with contextlib.ExitStack() as held:
        for name, who, advice in (
            (LOCK_NAME, "its flusher runs", stop),
            (USE_FILE, "a process has it open", "wait until that ends"),
        ):
            lock = ExclusiveLock(directory / name)
            if not lock.acquire():
                pids = ", ".join(map(str, _holders(lock.path)))
                named = f" (pid {pids})" if pids else ""
                raise StoreError(f"{store.place}: {who}{named}: {advice}", path=store.place)
            held.callback(lock.release)
        yield


def _holders(path: Path) -> list[int]:
    """Return the processes that hold a lock on a file, as far as the kernel shows them; see proc_locks(5)."""
    inode = str(path.stat().st_ino)
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        pids = {int(words[4]) for words in lines if words[5].rpartition(":")[2] == inode}
        return sorted(pid for pid in pids if pid > 0)  # others are of another container
    return []


def _has_left(root: Path, uuid: str) -> bool:
    """Return whether no store of this id is in a local directory. A descriptor that cannot be read counts as one."""
    try:
        return uuid.encode() not in (root / DESCRIPTOR).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _changed_ns(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _bytes_below(directory: Path, *, as_allocated: bool = True) -> int:
    """Return the bytes of all files below a directory, as far as they can be listed: on the disk, or their lengths."""
    size = 0
    for place, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(place, file), follow_symlinks=False)
                size += status.st_blocks * _SECTOR_BYTES if as_allocated else status.st_size
    return size
