"""``tierfs`` without a command: list the stores that have local tiers on this host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tierfs.cli.terminal.output import align, print_json, printable
from tierfs.errors import StoreError

ROWS_MAX = 30


class HostStore(NamedTuple):
    """A store that has local tiers on this host.

    Attributes:
        uuid: The store's id.
        place: Location of the store: a local path, or an endpoint and a bucket.
        is_pending: Whether this host has changes that the object tier lacks.
        has_flusher: Whether the store's flusher is running on this host.
        disk_bytes: Size of the nvme tier's files; 0 if there are none.
        is_gone: Whether the store was in a local directory that no longer exists.
    """

    uuid: str
    place: str
    is_pending: bool
    has_flusher: bool
    disk_bytes: int
    is_gone: bool = False


def show_stores(*, as_json: bool) -> int:
    """Print the stores of this host, pending ones first, and return the exit code."""
    from tierfs.host.host import state_directory  # noqa: PLC0415 - other commands do not need it

    state = state_directory()
    stores = sorted(host_stores(state), key=lambda store: (not store.is_pending, not store.has_flusher, store.place))
    if as_json:
        print_json({"state_directory": str(state), "stores": [store._asdict() for store in stores]})
        return 0
    if not stores:
        print(
            "No store has been opened on this host yet. `tierfs init URL` creates one, `tierfs --help` lists the commands."
        )
        return 0
    from tierfs.units import format_bytes  # noqa: PLC0415

    every, stores = stores, [store for store in stores if not store.is_gone or store.is_pending or store.has_flusher]
    rows = [("store", "pending", "flusher", "nvme tier")]
    rows += [
        (
            printable(store.place),
            "yes" if store.is_pending else "-",
            "running" if store.has_flusher else "-",
            format_bytes(store.disk_bytes) if store.disk_bytes else "-",
        )
        for store in stores[:ROWS_MAX]
    ]
    print("\n".join(align(rows, has_head=True, states=(1, 2))))
    if len(stores) > ROWS_MAX:
        print(f"... and {len(stores) - ROWS_MAX} more: `tierfs --json` lists all")
    if len(every) > len(stores):
        print(f"{len(every) - len(stores)} more were in directories that no longer exist: `tierfs --json` lists them")
    print("\n`tierfs status URL` shows one of them, `tierfs --help` lists the commands.")
    return 0


def host_stores(state: Path) -> Iterator[HostStore]:
    """Yield each store that has a folder with a ``place.json`` in the state directory."""
    from tierfs.host.identity import PLACE_FILE, places_in  # noqa: PLC0415
    from tierfs.host.nvme.stored import TIER  # noqa: PLC0415
    from tierfs.host.rpc.client import is_flusher_running  # noqa: PLC0415
    from tierfs.session.compose import is_pending  # noqa: PLC0415

    for folder in sorted((state / "stores").glob("*")):
        if not (folder / PLACE_FILE).exists():
            continue
        try:
            places = places_in(folder / PLACE_FILE)
        except StoreError:
            places = []
        root = places[0].removeprefix("file:") if places else ""
        yield HostStore(
            uuid=folder.name,
            place=root or "unknown: place.json is damaged",
            is_pending=is_pending(state, folder),
            has_flusher=is_flusher_running(folder),
            disk_bytes=_size(folder / TIER),
            is_gone=root.startswith("/") and not os.path.exists(root),
        )


def _size(directory: Path) -> int:
    """Return the bytes of all files below a directory, as far as they can be listed."""
    size = 0
    for place, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(place, file)).st_size
    return size
