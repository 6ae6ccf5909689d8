"""Find the store that holds a path by walking up as git does. One open store per process and root.

Each process caches its open stores. Nothing is kept across a fork: a child opens its stores again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shlex
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tierfs.digest import DigestKind
from tierfs.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    StoreNotFoundError,
)
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.objects import ObjectTier, as_promised, connect, probe
from tierfs.session.compose import check_nothing_is_left, compose, open_tiers, state_of, tier_settings, verify_writes
from tierfs.session.settings import ResolvedTiers
from tierfs.session.url import LOCAL, Location, parse_url, target_url
from tierfs.store.create import LEASE_S, check_digests, check_times, create_store, read_descriptor
from tierfs.store.looks import LOOK_S, within
from tierfs.store.offline import KnownStores, is_current
from tierfs.store.store import Store

NESTED_LOOKED_AT_MAX = 10_000
_logger = logging.getLogger("tierfs.store")
open_stores: dict[tuple[str, str], Store] = {}
_lock = threading.RLock()


def _renew() -> None:
    global _lock  # noqa: PLW0603 - a forked child must not inherit a lock that a lost thread holds
    _lock = threading.RLock()
    open_stores.clear()
    open_tiers.clear()


os.register_at_fork(after_in_child=_renew)


def init(
    url: str,
    *,
    digest: str = "xxh3-128",
    lease_s: int | None = None,
    grace_s: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Store:
    """Make a store at ``url``, or open the existing one. Any number of hosts may do so concurrently.

    If the object tier is unreachable, a store that this host knows is opened, and no store is made.

    Args:
        url: ``tierfs::s3://bucket/run``, ``s3://bucket/run``, ``tierfs://NAME``, or a local path.
        digest: The digests that name contents: ``xxh3-128``, or ``blake3`` if writers are not trusted.
        lease_s: How long a writer may rely on its knowledge of the store without renewal; by default 60 s.
        grace_s: How long replaced or deleted data stays readable, and garbage collection waits. At least two leases; by
            default an hour, or six leases if that is longer.
        options: For the object tier's own filesystem.

    Raises:
        InvalidInputError: The URL is invalid or lies inside another store; or the existing store has other digests, or
            another lease or grace.
        StoreError, CapacityError, ReadOnlyError: The object tier failed; or this host has pending changes for a store
            that was there. The error is transient if the object tier is unreachable and this host does not know the
            store.
    """
    location = parse_url(url)
    location = replace(location, options={**location.options, **(options or {})})
    kind = DigestKind.from_label(digest)
    check_times(LEASE_S if lease_s is None else lease_s, grace_s)
    store = _open_known(location)
    if store is None:
        try:
            store = _init(location, kind, lease_s, grace_s)
        except StoreError as error:
            if not error.transient:
                raise
            raise _unknown_and_away(location.url, error) from error
    there = store.descriptor
    check_digests(there, kind, store.url)
    if lease_s not in {None, there.lease_s} or grace_s not in {None, there.grace_s}:
        raise InvalidInputError(
            f"{store.url} is a store with a lease of {there.lease_s} s and a grace of {there.grace_s} s already: that cannot be "
            "changed",
            path=store.url,
        )
    return store


def _init(location: Location, kind: DigestKind, lease_s: int | None, grace_s: int | None) -> Store:
    for ancestor in _ancestors(location)[1:]:
        try:
            outer = _open_root(location, ancestor)
        except (NotFoundError, _RefusedError):
            continue
        raise InvalidInputError(f"{location.url} lies inside the store {outer.url}: use that one", path=location.url)
    return _create(location, location.path, kind, LEASE_S if lease_s is None else lease_s, grace_s)


def _open_known(location: Location) -> Store | None:
    """Return the store that this host knows at exactly this root, if it still exists or cannot be checked now."""
    root = location.path
    opened = _opened(location, root)
    if opened is not None:
        look = partial(_is_there, location, root, opened)
        try:
            if look() if opened.descriptor.endpoint.host_local else within(LOOK_S, look):
                return opened
        except StoreError as error:
            if not error.transient:
                raise
            return opened
    if known_stores(location).find(target_url(location.protocol, root)) is None:
        return None
    try:
        return _open_root(location, root, has_known=True)
    except (NotFoundError, _RefusedError):
        return None


def _unknown_and_away(url: str, error: StoreError) -> StoreError:
    return StoreError(
        f"{url} cannot be opened, because its object tier does not answer and this host has not opened a store there "
        f"before, in this state directory and with these options; nothing was made. Try again when it answers: {error}",
        transient=True,
        path=url,
        tier="object",
    )


def open_store(location: Location, *, write: bool = False, create: bool = False) -> tuple[Store, str]:
    """Open the store that holds ``location``.

    Args:
        location: The path of a file, a directory, or the root itself.
        write: Whether the caller writes. Then a store that was opened before is checked to still exist.
        create: Make a store if there is none: at the root that the configuration gives a named store, else in the
            directory that holds ``location``.

    Returns:
        The store, and the path relative to its root; empty for the root itself.

    Raises:
        StoreNotFoundError: No store holds ``location``.
        ReadOnlyError: Access to a directory further up was denied: the message names the root to give. Or the state
            directory belongs to another user, and this user asked for local tiers.
        CorruptionError, FormatError: The descriptor is damaged, or of another version.
        StoreError: The object tier failed; or this host has pending changes for a store that was there.
    """
    refused: list[str] = []
    ancestors = _ancestors(location)
    for root in ancestors:
        known = _opened(location, root)
        if known is not None and (not write or _is_there(location, root, known)):
            return known, _relative(root, location.path)
    known_roots = [root for root in ancestors if known_stores(location).find(target_url(location.protocol, root))]
    unreachable: StoreError | None = None
    for root in ancestors:
        try:
            store = _open_root(location, root, has_known=bool(known_roots), is_unreachable=unreachable is not None)
        except NotFoundError:
            continue
        except _RefusedError:
            refused.append(root)
            continue
        except StoreError as error:
            if not error.transient:
                raise
            if not known_roots:
                raise _unknown_and_away(location.url, error) from error
            unreachable = unreachable or error
            continue
        return store, _relative(root, location.path)
    if unreachable is not None:
        raise unreachable
    new = _new_root(location, ancestors)
    # Who reads names a run or the store itself. There is no advice to make a bucket or /tmp a store.
    is_itself = not write or "/" not in new.strip("/") or (location.protocol in LOCAL and os.path.isdir(location.path))
    proposed = location.path if (is_itself or new in refused) and not location.root else new
    advice = f"tierfs init {shlex.quote(target_url(location.protocol, proposed))}"
    if refused:
        raise ReadOnlyError(
            f"no store was found above {location.url}, and access to {target_url(location.protocol, refused[0])} was "
            f"denied: ask for the right to read it if the store's root is there, else make one: {advice}",
            path=location.url,
        )
    _check_nothing_is_left(location, ancestors)
    for root in ancestors:
        with contextlib.suppress(StoreError, ReadOnlyError):  # some directories further up may not be listed
            _refuse_headless(connect(location.protocol, root, location.options), target_url(location.protocol, root))
    if create:
        return _create(location, new, DigestKind.XXH3_128), _relative(new, location.path)
    raise StoreNotFoundError(
        f"no store holds {location.url}: check the URL, or make a store there or above it, such as: {advice}",
        path=location.url,
    )


def _check_nothing_is_left(location: Location, ancestors: list[str]) -> None:
    """Check that this host has no pending changes for a store that was here. See `check_nothing_is_left`."""
    state = state_of(location)
    if os.path.isdir(state / "stores"):
        tiers = (connect(location.protocol, root, location.options) for root in ancestors)
        check_nothing_is_left(state, [name for objects in tiers for name in objects.places()])


def _is_there(location: Location, root: str, known: Store) -> bool:
    """Return whether ``root`` still holds this store; if not, forget it."""
    if is_current(known):
        return True
    _logger.warning("%s was deleted or recreated: opening it again", known.url)
    with _lock:
        if open_stores.get((_token(location), root)) is known:
            del open_stores[_token(location), root]
    return False


def has_records(objects: ObjectTier) -> bool:
    """Return whether the base of ``objects`` holds records of a store, with or without a descriptor."""
    return next(iter(objects.list(keys.TREE)), None) is not None


def _refuse_headless(objects: ObjectTier, url: str) -> None:
    """Check that no store lost its descriptor here: a new one would have another id and perhaps other digests.

    Raises:
        CorruptionError: The records of a store are there.
    """
    if not has_records(objects):
        return
    try:
        read_descriptor(objects, url)  # another host may have made the store and saved a file meanwhile
    except NotFoundError:
        raise CorruptionError(
            f"{url}/{keys.DESCRIPTOR} is missing, but records of its store are there: restore it from a copy of the "
            f"store with: tierfs repair {shlex.quote(url)} --from COPY",
            path=url,
        ) from None


def _refuse_nested(objects: ObjectTier, url: str) -> None:
    """Check that no store lies below a root to make. Only the first `NESTED_LOOKED_AT_MAX` objects are checked."""
    for item in itertools.islice(objects.list(""), NESTED_LOOKED_AT_MAX):
        if item.key.endswith(f"/{keys.DESCRIPTOR}"):
            inner = item.key.removesuffix(f"/{keys.DESCRIPTOR}")
            raise InvalidInputError(f"{url}/{inner} is a store: make this one beside it, or use that one", path=url)


def _create(
    location: Location, root: str, kind: DigestKind, lease_s: int = LEASE_S, grace_s: int | None = None
) -> Store:
    objects = connect(location.protocol, root, location.options)
    url = target_url(location.protocol, root)
    endpoint = objects.capabilities
    try:
        read_descriptor(objects, url)
    except NotFoundError:
        _check_nothing_is_left(location, [root])
        _refuse_headless(objects, url)
        _refuse_nested(objects, url)
        if not endpoint.host_local:
            # The probe retries transient failures itself, but not the failures that it provokes.
            endpoint = probe(connect(location.protocol, root, location.options, attempts=1)).capabilities
    promised = as_promised(objects, endpoint, verify_writes(location))
    descriptor, made = create_store(
        promised, url, digest=kind, random_bytes=os.urandom(16), lease_s=lease_s, grace_s=grace_s
    )
    if made:
        _logger.info("made the store %s", url)
    _remember(location, url, descriptor, objects.places())
    with _lock:
        known = _opened(location, root)
        if known is not None and known.descriptor == descriptor:
            return known
        store = open_stores[_token(location), root] = compose(location, objects, descriptor, url, objects.places())
        return store


class _RefusedError(Exception):
    """Access to a root was denied. A class of its own, to tell it from local tiers that may not be used."""


def _open_root(location: Location, root: str, *, has_known: bool = False, is_unreachable: bool = False) -> Store:
    """Open the store at ``root``.

    Args:
        location: The location that the store is opened for.
        root: The possible root.
        has_known: Whether this host knows a store here or further up, so that it need not wait long for the object
            tier.
        is_unreachable: Whether the object tier was found unreachable, so that no request is sent.
    """
    known = _opened(location, root)
    if known is not None:
        return known
    objects = connect(location.protocol, root, location.options)
    url = target_url(location.protocol, root)
    try:
        if is_unreachable:
            raise StoreError("the object tier did not answer a moment ago", transient=True, tier="object")
        descriptor = (
            within(LOOK_S, lambda: read_descriptor(objects, url)) if has_known else read_descriptor(objects, url)
        )
    except ReadOnlyError as error:
        raise _RefusedError(root) from error
    except StoreError as error:
        kept = known_stores(location).find(url) if error.transient else None
        if kept is None:
            raise
        _logger.warning(
            "the object tier of %s is unreachable: opening the store from this host's records: %s", url, error
        )
        descriptor, places = kept
    else:
        kept = None
        places = objects.places()
        _remember(location, url, descriptor, places)
    with _lock:
        known = _opened(location, root)
        if known is not None:
            return known
        store = open_stores[_token(location), root] = compose(location, objects, descriptor, url, places)
        if kept is not None:
            store.checked_at = float("-inf")  # the store was opened without asking the object tier: the next check does
        return store


def _opened(location: Location, root: str) -> Store | None:
    """Return the open store of this process at a root, unless its local tiers were closed, as they are at exit."""
    store = open_stores.get((_token(location), root))
    return None if store is None or (store.tiers is not None and store.tiers.is_closed) else store


def _remember(location: Location, url: str, descriptor: Descriptor, places: tuple[str, ...]) -> None:
    """Save the descriptor for when the object tier is unreachable, unless it is a directory of this host."""
    if not descriptor.endpoint.host_local:
        known_stores(location).remember(url, descriptor, places)


def known_stores(location: Location) -> KnownStores:
    """Return the stores that this host has opened with these options."""
    return KnownStores(state_of(location), json.dumps(location.options, sort_keys=True, default=repr))


def open_bare(location: Location) -> tuple[Store, ResolvedTiers]:
    """Open the store that holds ``location`` without its local tiers, for its flusher.

    Args:
        location: The path of a file, a directory, or the root itself.

    Returns:
        The store, and the settings of its local tiers for other processes.

    Raises:
        StoreNotFoundError: No store holds ``location``.
        ReadOnlyError, CorruptionError, FormatError, StoreError: As in `open_store`.
    """
    for root in _ancestors(location):
        objects = connect(location.protocol, root, location.options)
        url = target_url(location.protocol, root)
        try:
            descriptor = read_descriptor(objects, url)
        except NotFoundError:
            continue
        promised = as_promised(
            objects, descriptor.endpoint, verify_writes(location), checks_conditions=not location.is_process_local
        )
        settings = tier_settings(location, descriptor, root)[1]
        return Store(promised, descriptor, url=url, codecs=settings.codecs, state_dir=settings.directory), settings
    raise StoreNotFoundError(f"no store holds {location.url}", path=location.url)


def _ancestors(location: Location) -> list[str]:
    """Return the path itself and every directory above it, nearest first."""
    path = location.path
    found = []
    while path and path != "/" and not path.endswith(":/"):  # a web address has "https:/" above its host
        found.append(path)
        path = path.rpartition("/")[0]
    if location.path.startswith("/"):
        found.append("/")
    return found


def _new_root(location: Location, ancestors: list[str]) -> str:
    """Return where a store would be made for this path: in the directory that holds it."""
    if location.root:
        return location.root
    if not ancestors:
        raise InvalidInputError(f"{location.url!r} is not a place for a store", path=location.url)
    return ancestors[1] if len(ancestors) > 1 and ancestors[1] != "/" else ancestors[0]


def _relative(root: str, path: str) -> str:
    return path[len(root) :].strip("/")


def _token(location: Location) -> str:
    """Return a key that distinguishes object tiers and options. Never show it, since options may hold secrets."""
    return f"{location.protocol}:{json.dumps(location.options, sort_keys=True, default=repr)}:{location.tiers}:{location.configured}"
