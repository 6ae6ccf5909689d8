"""Requests for a store whose object tier may be unreachable, and the descriptors that this host keeps for that case.

A save that the flusher publishes needs the object tier only to observe the version that it replaces. While the object
tier does not answer, the version that this host saw last is used, and callers do not wait for each request anew.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tierfs.checked_json import parse_object
from tierfs.errors import NotFoundError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from tierfs.host.filesystems import make_private
from tierfs.host.pending.levels import Level
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import Version
from tierfs.store.looks import LOOK_S, begin, within
from tierfs.store.store import Store

AWAY_S = 30.0
_Answer = TypeVar("_Answer")
_logger = logging.getLogger("tierfs.store")


def ask_briefly(store: Store, look: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``look``, which asks the object tier of a store with local tiers, within LOOK_S seconds.

    There is no time limit if the object tier is a directory of this host. After a transient failure, each call fails at
    once for AWAY_S seconds.

    Raises:
        StoreError: There was no answer in time, or an earlier call failed less than AWAY_S seconds ago. The error is
            transient.
        TierfsError: Raised by ``look``.
    """
    tiers = store.tiers
    assert tiers is not None
    if store.clock.monotonic() < tiers.away_until_s:
        raise StoreError("the object tier did not answer a moment ago", transient=True, tier="object")
    try:
        # A directory of this host is always reachable, and reading it takes less time than starting a thread.
        return look() if store.descriptor.endpoint.host_local else within(LOOK_S, look)
    except StoreError as error:
        if error.transient:
            tiers.away_until_s = store.clock.monotonic() + AWAY_S
        raise


def writes_go_on(store: Store) -> bool:
    """Return whether saves continue while the object tier is unreachable, because the flusher publishes them later."""
    return store.tiers is not None and store.ack is not Level.OBJECT


def ask(store: Store, look: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``look``. If saves go on while the object tier is unreachable, ask as `ask_briefly` does."""
    return ask_briefly(store, look) if writes_go_on(store) else look()


def check_reachable(store: Store) -> None:
    """Check, for a change or a listing that needs the object tier, that it answers within LOOK_S seconds.

    A store whose saves wait for the object tier anyway is not checked.

    Raises:
        StoreError: It does not. The error is transient.
        TierfsError: The root does not hold a store any more.
    """
    if writes_go_on(store) and not store.descriptor.endpoint.host_local:
        ask_briefly(store, lambda: store.objects.head(keys.DESCRIPTOR))


def while_reachable(store: Store, work: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``work``, which needs the object tier. Fail if the object tier stops answering.

    It is checked before, and every LOOK_S seconds meanwhile. ``work`` continues after a failure, until its own requests
    fail. A store whose saves wait for the object tier anyway is not checked.

    Raises:
        StoreError: The object tier does not answer. The error is transient.
        TierfsError: Raised by ``work``, or the root does not hold a store any more.
    """
    check_reachable(store)
    if not writes_go_on(store) or store.descriptor.endpoint.host_local:
        return work()
    future = begin(work)
    while not concurrent.futures.wait([future], LOOK_S).done:
        check_reachable(store)
    return future.result()


def is_current(store: Store) -> bool:
    """Return whether the root still holds a store, which was neither deleted nor replaced by a new one.

    Asks the object tier each time if it is a directory of this host, else once in the duration of a lease. If a
    store with local tiers gets no answer, this is logged and counted, and the result is True.

    Raises:
        StoreError, ReadOnlyError, CorruptionError, FormatError: The descriptor cannot be read.
    """
    now = store.clock.monotonic()
    if not store.descriptor.endpoint.host_local and now < store.checked_at + store.descriptor.lease_s:
        return True
    try:
        version = _version(store) if store.tiers is None else ask_briefly(store, lambda: _version(store))
    except NotFoundError:
        return False
    except StoreError as error:
        if not error.transient or store.tiers is None:
            raise
        store.tiers.counters.fall_back("unchecked_stores", "cannot check whether %s still exists: %s", store.url, error)
        return True
    if version is None:
        return False
    store.checked_at, store.descriptor_version = now, version
    return True


def _version(store: Store) -> Version | None:
    """Return the version of the descriptor at the root, or None if it is the descriptor of another store."""
    version = store.objects.head(keys.DESCRIPTOR).version
    if version != store.descriptor_version:
        where = store.where(keys.DESCRIPTOR)
        found, info, _ = read_decoded(store.objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)
        if found.uuid != store.descriptor.uuid:
            return None
        version = info.version
    return version


class KnownStores:
    """The stores that this host has opened, so that it can open them while their object tier is unreachable.

    Args:
        through: Options of the object tier's filesystem. The same URL names another store at another endpoint or
            account. The options may hold secrets, so only a digest of them is kept.
    """

    def __init__(self, directory: Path, through: str = "") -> None:
        self._directory = directory / "known"
        self._through = through

    def remember(self, url: str, descriptor: Descriptor, places: Sequence[str]) -> None:
        """Keep the descriptor of the store at a root, and its places: see `ObjectTier.places`.

        If they cannot be written, the store cannot be opened while it is unreachable.
        """
        path = self._path(url)
        data = json.dumps({"descriptor": descriptor.encode().decode(), "places": list(places)}).encode()
        try:
            if path.exists() and path.read_bytes() == data:
                return
            make_private(self._directory.parent)
            make_private(self._directory)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.touch(0o600)
            temporary.write_bytes(data)
            temporary.replace(path)
        except (TierfsError, OSError) as error:
            _logger.info("this host cannot keep the descriptor of %s: %s", url, error)

    def find(self, url: str) -> tuple[Descriptor, tuple[str, ...]] | None:
        """Return the descriptor and the places of the store that this host last saw at a root, if any."""
        path = self._path(url)
        try:
            kept = parse_object(path.read_bytes(), str(path))
            return Descriptor.decode(kept["descriptor"].encode(), str(path)), tuple(map(str, kept["places"]))
        except (FileNotFoundError, PermissionError):
            return None
        except (TierfsError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _logger.warning("the descriptor of %s that this host kept is unusable: %s", url, error)
            return None

    def _path(self, url: str) -> Path:
        name = hashlib.sha256(f"{url}\n{self._through}".encode()).hexdigest()
        return self._directory / f"{name}.json"
