"""Puts a store together with its local tiers, as a location's options, the environment and the configuration say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.errors import TierfsError
from tierfs.format.descriptor import Descriptor
from tierfs.host.filesystems import filesystem_of, is_network
from tierfs.host.host import state_directory
from tierfs.host.identity import DamagedPlaceError
from tierfs.objects import ObjectTier, as_promised
from tierfs.session.settings import ResolvedTiers, TierOptions, from_environment, resolve
from tierfs.session.url import Location, configured_tiers
from tierfs.store.store import Store

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers

__all__ = ["compose", "forget_tiers", "open_tiers", "state_of", "tier_settings", "verify_writes"]

_logger = logging.getLogger("tierfs.store")
open_tiers: dict[tuple[str, tuple[str, ...], TierOptions], Tiers] = {}
"""The local tiers that this process uses, by store, place and options."""


def forget_tiers() -> None:
    """Use none of them any more, as in a forked child."""
    open_tiers.clear()


def compose(
    location: Location, objects: ObjectTier, descriptor: Descriptor, url: str, places: tuple[str, ...]
) -> Store:
    """Put an open store together with its local tiers. Stores of this process with the same settings share them.

    Callers hold the lock of the table of open stores.

    Args:
        location: The place that it is opened for.
        objects: The object tier, with its promises as the backend states them.
        descriptor: The store's.
        url: The root's.
        places: What the object tier calls the place of the root: see `ObjectTier.places`.

    Raises:
        TierfsError: Local tiers were asked for, and cannot be used.
    """
    objects = as_promised(objects, descriptor.endpoint, verify_writes(location))
    options, settings, host_local = tier_settings(location, descriptor, url.partition("://")[2])
    process_local = location.protocol == "memory"
    tiers: Tiers | None = None
    hidden: TierfsError | None = None
    unused = ""
    hand_over: Callable[[bool], None] | None = None
    if settings.ram_bytes or settings.nvme_bytes:
        key = (
            descriptor.uuid,
            places,
            replace(options, ack=None, timeout=None, bandwidth=None, codecs=None, device=None),
        )
        tiers = open_tiers.get(key)
        from tierfs.session import tiers as localtiers  # noqa: PLC0415 - brings numpy, which takes a while

        options_given = dict(location.options)
        if tiers is None:
            target = localtiers.TieredStore(
                descriptor.uuid, url, places, options_given, descriptor.digest_kind, host_local, process_local
            )
            try:
                home = localtiers.home_of(target, settings)
            except TierfsError as error:
                # Published files can be read without them.
                if options.is_explicit and not isinstance(error, DamagedPlaceError):
                    raise
                _logger.warning("%s is used without local tiers: %s", url, error)
                unused = str(error)
                hidden = error if localtiers.may_hide(error, descriptor.uuid, settings) else None
            else:

                def open_plain() -> Store:
                    return Store(objects, descriptor, url=url, codecs=settings.codecs)

                tiers = open_tiers[key] = localtiers.tiers_for(
                    target, settings, open_plain, home, resumes=location.resumes
                )
        if tiers is not None:
            shared = tiers

            def hand_over(writes: bool) -> None:
                localtiers.hand_over(shared, options_given, writes=writes)

    return Store(
        objects,
        descriptor,
        url=url,
        tiers=tiers,
        hidden=hidden,
        ack=settings.ack,
        timeout_s=settings.timeout_s,
        state_dir=settings.directory,
        codecs=settings.codecs,
        device_bytes=settings.device_bytes,
        unused=unused,
        hand_over=hand_over,
    )


def verify_writes(location: Location) -> str:
    """How writes to the object tier are verified: see `as_promised`."""
    return str(location.options.get("verify_writes", "auto"))


def tier_settings(location: Location, descriptor: Descriptor, root: str) -> tuple[TierOptions, ResolvedTiers, bool]:
    """How a store's local tiers are set up: as asked for, what that comes to, and whether the object tier is this host's."""
    options = _options_of(location)
    process_local = location.protocol == "memory"
    # A directory may be the host's own when the store is made, and be mounted from elsewhere on other hosts.
    host_local = descriptor.endpoint.host_local and (process_local or not is_network(filesystem_of(root)))
    settings = resolve(options, descriptor.uuid, host_local=host_local, process_local=process_local)
    return options, settings, host_local


def _options_of(location: Location) -> TierOptions:
    return location.tiers.over(from_environment()).over(location.configured).over(configured_tiers())


def state_of(location: Location) -> Path:
    """The state directory of the stores that are opened for this location."""
    return state_directory(_options_of(location).state_dir)
