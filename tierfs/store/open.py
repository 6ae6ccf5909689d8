"""Find the store that a path lies in, by walking up as git does; one open store per process and root.

The answer is kept for the process. Nothing is kept across a fork: a child opens its stores anew.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace

from tierfs.digest import DigestKind
from tierfs.errors import InvalidInputError, NotFoundError, ReadOnlyError, StoreNotFoundError
from tierfs.format import keys
from tierfs.objects import ObjectTier, connect
from tierfs.store.create import create_store, read_descriptor
from tierfs.store.store import Store
from tierfs.store.url import Location, parse_url

__all__ = ["init", "open_store"]

NESTED_LOOKED_AT_MAX = 10_000
_logger = logging.getLogger("tierfs.store")
_stores: dict[tuple[str, str], Store] = {}
_lock = threading.RLock()


def _renew() -> None:
    global _lock  # noqa: PLW0603 - a forked child must not inherit a lock that a lost thread holds
    _lock = threading.RLock()
    _stores.clear()


os.register_at_fork(after_in_child=_renew)


def init(url: str, *, digest: str = "xxh3-128", options: Mapping[str, object] | None = None) -> Store:
    """Make a store at ``url``, or open the one that is there. Any number of hosts may do it at once.

    Args:
        url: ``tierfs::s3://bucket/run``, ``s3://bucket/run``, ``tierfs://NAME``, or a local path.
        digest: How contents are named: ``xxh3-128``, or ``blake3`` where writers are not trusted.
        options: For the object tier's own filesystem.

    Raises:
        InvalidInputError: The URL is no good, lies inside another store, or the store has other digests.
        StoreError, CapacityError, ReadOnlyError: It failed.
    """
    location = parse_url(url)
    location = replace(location, options={**location.options, **(options or {})})
    kind = DigestKind.from_label(digest)
    for ancestor in _ancestors(location)[1:]:
        try:
            outer = _open_root(location, ancestor)
        except (NotFoundError, ReadOnlyError):
            continue
        raise InvalidInputError(f"{location.url} lies inside the store {outer.url}: use that one", path=location.url)
    return _create(location, location.path, kind)


def open_store(location: Location, *, write: bool = False, create: bool = False) -> tuple[Store, str]:
    """Open the store that holds ``location``.

    Args:
        location: The path of a file, a directory, or the root itself.
        write: Whether to write to it: a store that was opened before is then checked to be there still.
        create: Make one if there is none: at the root a named store has in the configuration, else in the directory
            that holds ``location``.

    Returns:
        The store, and the path relative to its root; empty for the root itself.

    Raises:
        StoreNotFoundError: There is none.
        ReadOnlyError: Looking further up was refused: the message names the root to give.
        CorruptionError, FormatError: The descriptor is damaged, or of another version.
        StoreError: It failed.
    """
    refused = ""
    ancestors = _ancestors(location)
    for root in ancestors:
        known = _stores.get((_token(location), root))
        if known is not None and (not write or _is_there(location, root, known)):
            return known, _relative(root, location.path)
    for root in ancestors:
        try:
            store = _open_root(location, root)
        except NotFoundError:
            continue
        except ReadOnlyError:
            refused = refused or root
            continue
        return store, _relative(root, location.path)
    if refused:
        raise ReadOnlyError(
            f"no store was found above {location.url}, and {location.protocol}://{refused} may not be looked into: ask for "
            "the right to read it if the store's root is there, else make one: "
            f"tierfs init {location.protocol}://{_new_root(location, ancestors)}",
            path=location.url,
        )
    if not create:
        raise StoreNotFoundError(
            f"no store holds {location.url}: make one with: "
            f"tierfs init {location.protocol}://{_new_root(location, ancestors)}",
            path=location.url,
        )
    root = _new_root(location, ancestors)
    store = _create(location, root, DigestKind.XXH3_128)
    return store, _relative(root, location.path)


def _is_there(location: Location, root: str, known: Store) -> bool:
    """Whether ``root`` holds this store still; if not, it is forgotten."""
    if known.is_current():
        return True
    _logger.warning("%s was deleted or made anew: it is opened again", known.url)
    with _lock:
        if _stores.get((_token(location), root)) is known:
            del _stores[_token(location), root]
    return False


def _refuse_nested(objects: ObjectTier, url: str) -> None:
    """Check that no store lies below a root that is to be made; of very many objects, only the first are looked at."""
    for item in itertools.islice(objects.list(""), NESTED_LOOKED_AT_MAX):
        if item.key.endswith(f"/{keys.DESCRIPTOR}"):
            inner = item.key.removesuffix(f"/{keys.DESCRIPTOR}")
            raise InvalidInputError(f"{url}/{inner} is a store: make this one beside it, or use that one", path=url)


def _create(location: Location, root: str, kind: DigestKind) -> Store:
    objects = connect(location.protocol, root, location.options)
    url = f"{location.protocol}://{root}"
    try:
        read_descriptor(objects, url)
    except NotFoundError:
        _refuse_nested(objects, url)
    descriptor, made = create_store(objects, url, digest=kind, random_bytes=os.urandom(16))
    if made:
        _logger.info("made the store %s", url)
    with _lock:
        known = _stores.get((_token(location), root))
        if known is not None and known.descriptor == descriptor:
            return known
        store = _stores[_token(location), root] = Store(objects, descriptor, url=url)
        return store


def _open_root(location: Location, root: str) -> Store:
    key = (_token(location), root)
    known = _stores.get(key)
    if known is not None:
        return known
    objects = connect(location.protocol, root, location.options)
    url = f"{location.protocol}://{root}"
    descriptor = read_descriptor(objects, url)
    with _lock:
        return _stores.setdefault(key, Store(objects, descriptor, url=url))


def _ancestors(location: Location) -> list[str]:
    """The path itself and every directory above it, nearest first."""
    path = location.path
    found = []
    while path and path != "/":
        found.append(path)
        path = path.rpartition("/")[0]
    if location.path.startswith("/"):
        found.append("/")
    return found


def _new_root(location: Location, ancestors: list[str]) -> str:
    """Where a store would be made for this path: in the directory that holds it."""
    if location.root:
        return location.root
    if not ancestors:
        raise InvalidInputError(f"{location.url!r} names no place for a store", path=location.url)
    return ancestors[1] if len(ancestors) > 1 and ancestors[1] != "/" else ancestors[0]


def _relative(root: str, path: str) -> str:
    return path[len(root) :].strip("/")


def _token(location: Location) -> str:
    """Tells object tiers with other options apart; never shown, since options may hold secrets."""
    return f"{location.protocol}:{json.dumps(location.options, sort_keys=True, default=repr)}"
