"""Compose a store with its local tiers, by the location's options, the environment and the configuration.

`check_nothing_is_left` finds this host's pending changes for a store that is gone from its place: its disk may not be
mounted.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.errors import NotFoundError, StoreError, TierfsError
from tierfs.format.descriptor import Descriptor
from tierfs.host.filesystems import filesystem_of, is_network
from tierfs.host.host import Host, state_directory
from tierfs.host.local_state import PLACE_FILE, DamagedPlaceError, LocalStore, is_pending, local_stores, places_in
from tierfs.objects import ObjectTier, as_promised
from tierfs.objects.backends.local import DIRECTORY
from tierfs.objects.registry import connect
from tierfs.session.settings import ResolvedTiers, TierOptions, from_environment, resolve
from tierfs.session.url import Location, configured_tiers, parse_url
from tierfs.store.store import Store

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers

_logger = logging.getLogger("tierfs.store")
open_tiers: dict[tuple[str, tuple[str, ...], TierOptions], Tiers] = {}
"""The local tiers in use by this process, by store, place and options."""


def compose(
    location: Location, objects: ObjectTier, descriptor: Descriptor, url: str, places: tuple[str, ...]
) -> Store:
    """Compose an open store with its local tiers. Stores of this process with the same settings share them.

    The caller holds the lock of the table of open stores.

    Raises:
        TierfsError: The user asked for local tiers, and they cannot be used.
    """
    objects = as_promised(
        objects, descriptor.endpoint, verify_writes(location), checks_conditions=not location.is_process_local
    )
    options, settings, host_local = tier_settings(location, descriptor, url.partition("://")[2])
    plain = partial(Store, objects, descriptor, url=url, codecs=settings.codecs, state_dir=settings.directory)
    opened = partial(plain, ack=settings.ack, timeout_s=settings.timeout_s, device_bytes=settings.device_bytes)
    if not (settings.ram_bytes or settings.nvme_bytes):
        return opened()
    from tierfs.session import tiers as localtiers  # noqa: PLC0415 - brings numpy, which takes a while

    given = dict(location.options)
    key = (descriptor.uuid, places, replace(options, ack=None, timeout=None, bandwidth=None, codecs=None, device=None))
    tiers = open_tiers.get(key)
    if tiers is None or tiers.is_closed:
        target = localtiers.TieredStore(
            descriptor.uuid, url, places, given, descriptor.digest_kind, host_local, location.is_process_local
        )
        try:
            home = localtiers.home_of(target, settings)
        except TierfsError as error:
            # Published files can be read without local tiers.
            if options.is_explicit and location.needs_tiers and not isinstance(error, DamagedPlaceError):
                raise
            _logger.warning("%s is used without local tiers: %s", url, error)
            hidden = error if localtiers.may_hide(error, descriptor.uuid, settings) else None
            return opened(hidden=hidden, unused=str(error))
        tiers = open_tiers[key] = localtiers.tiers_for(target, settings, plain, home, resumes=location.resumes)
    return opened(tiers=tiers, handed_over=(given, options.codecs))


def verify_writes(location: Location) -> str:
    """Return how writes to the object tier are verified: see `as_promised`."""
    return str(location.options.get("verify_writes", "auto"))


def tier_settings(location: Location, descriptor: Descriptor, root: str) -> tuple[TierOptions, ResolvedTiers, bool]:
    """Return a store's tier options, the same resolved on this host, and whether the object tier is on this host."""
    options = _options_of(location)
    process_local = location.is_process_local
    # The host that made the store may have its directory locally, while other hosts mount it over a network.
    host_local = descriptor.endpoint.host_local and (process_local or not is_network(filesystem_of(root)))
    settings = resolve(options, descriptor.uuid, host_local=host_local, process_local=process_local)
    return options, settings, host_local


def _options_of(location: Location) -> TierOptions:
    return location.tiers.over(from_environment()).over(location.configured).over(configured_tiers())


def state_of(location: Location) -> Path:
    """Return the state directory of the stores that are opened for this location."""
    return state_directory(_options_of(location).state_dir)


def check_nothing_is_left(state: Path, places: Collection[str]) -> None:
    """Check that nothing is pending for a store at one of these places, where no store is found.

    Args:
        state: The state directory.
        places: See `ObjectTier.places`. Inode numbers of directories are ignored: an unmounted directory has another
            number, or the number was reused.

    Raises:
        StoreError: Changes are pending, or that cannot be determined.
    """
    for kept in sorted((state / "stores").glob(f"*/{PLACE_FILE}")):
        here = [name for name in _places_in(kept) if name in places and not name.startswith(DIRECTORY)]
        if here and is_pending(state, kept.parent):
            where = here[0].removeprefix("file:")
            raise StoreError(
                f"this host has changes pending for the store that was at {where}, but no store is there now: mount "
                f"it or put it back, and they are flushed; to discard them, run `tierfs flusher stop {shlex.quote(where)}` "
                f"and remove {kept.parent}{_segments_of(state, kept.parent)} while no process uses it",
                transient=True,
                path=where,
            )


def _places_in(kept: Path) -> list[str]:
    try:
        return places_in(kept)
    except StoreError as error:
        # Opening that store raises this error. Other stores are not affected.
        _logger.warning("the pending changes of one store are unknown: %s", error)
        return []


def _segments_of(state: Path, directory: Path) -> str:
    """Return the segment files that hold the changes, as text: their memory stays allocated without the directory."""
    try:
        folders = Host(state).folders
    except TierfsError:
        return ""
    name = f"{directory.name[:8]}-*.slab"
    return "".join(f" and {folder / name}" for folder in folders if list(folder.glob(name)))


def local_store(state: Path, text: str) -> LocalStore:
    """Return the store of this host that a text names: its id, its place as `local_stores` shows it, or its URL.

    Raises:
        NotFoundError: This host keeps nothing of such a store.
        InvalidInputError: The URL is invalid.
    """
    stores = local_stores(state)
    found = [store for store in stores if text in (store.uuid, store.place)]
    if not found:
        location = parse_url(text)
        objects = connect(location.protocol, location.path, location.options)
        places = {name for name in objects.places() if not name.startswith(DIRECTORY)}
        found = [store for store in stores if {store.place, f"file:{store.place}"} & places]
    if not found:
        raise NotFoundError(f"this host keeps nothing of a store at {text}: `tierfs` lists its stores", path=text)
    return min(found, key=lambda store: store.is_gone)
