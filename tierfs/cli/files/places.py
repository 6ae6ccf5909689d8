"""Resolve arguments to places: a path in a store, or a local path. Only this module of the CLI parses URLs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from tierfs.cli.arguments import suggested
from tierfs.cli.files.transfer import (
    FileContent,
    fill_local,
    fill_stored,
    known_size,
    local_content,
    stored_content,
    walk,
)
from tierfs.digest import DigestKind
from tierfs.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError, StoreNotFoundError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.host.pending.levels import Level
from tierfs.objects.registry import connect
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.session.url import Location, asks_to_create, check_path, target_url
from tierfs.store import Entry, Store, find, make_directory, stat
from tierfs.store.status import request_metrics
from tierfs.store.tree.kind import Kind

IN_STORE = ("tierfs::", "tierfs://")
NO_TIERS = TierOptions(ack="object", ram="0", nvme="0", peers="0")
_LATEST_OR_BEST = re.compile(r"(^|/)(latest|best(:[^:/]+(:max)?)?)$")
_LISTINGS_MAX = 5
_URL = re.compile(r"[a-z][a-z0-9+._-]*://|[a-z][a-z0-9+._-]*::", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A path in a store.

    Attributes:
        url: Full ``tierfs`` URL, without a trailing ``/``.
        store: The store that contains the path.
        path: Relative to the store's root; empty for the root.
    """

    url: str
    store: Store
    path: str

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rpartition("/")[2]

    def child(self, relative: str) -> StorePlace:
        """Return the place at a path relative to this one; this place if the path is empty.

        Raises:
            InvalidInputError: The path is not valid in a store.
        """
        if not relative:
            return self
        path = keys.validate_path(f"{self.path}/{relative}" if self.path else relative)
        return StorePlace(f"{self.url}/{relative}", self.store, path)

    def relative(self, path: str) -> str:
        """Return a path of the store relative to this place."""
        return path[len(self.path) :].lstrip("/")

    def entry(self) -> Entry:
        """Return the file or directory at this place.

        Raises:
            NotFoundError: Nothing is there. The message names the next step.
        """
        with self.must_exist():
            return stat(self.store, self.path)

    @contextlib.contextmanager
    def must_exist(self) -> Iterator[None]:
        """Replace a `NotFoundError` of the ``with`` block by one whose message names the next step."""
        try:
            yield
        except NotFoundError:
            raise self.missing() from None

    def missing(self) -> NotFoundError:
        """Return the error for a path with nothing there. It names the nearest directory above that exists."""
        above, path = self.url.rpartition("/")[0], self.path.rpartition("/")[0]
        while path and StorePlace(above, self.store, path).kind() != "directory":
            above, path = above.rpartition("/")[0], path.rpartition("/")[0]
        return NotFoundError(f"{self.url} does not exist: {suggested('ls', above)} lists what is there", path=self.url)

    def resolved(self) -> StorePlace:
        """Return the checkpoint that ``latest`` or ``best`` at the end of the path names, unless something is there.

        Raises:
            NotFoundError, InvalidInputError, TierfsError: See `named_checkpoint`.
        """
        if not names_checkpoint(self.path) or self.kind() is not None:
            return self
        from tierfs.checkpoint.catalog import named_checkpoint  # noqa: PLC0415 - most paths need none of it

        above, _, name = self.path.rpartition("/")
        path = named_checkpoint(self.store, above, name)
        return StorePlace(f"{self.url.rpartition('/')[0]}/{path.rpartition('/')[2]}", self.store, path)

    def kind(self) -> Kind | None:
        """Return the kind of the entry here, or None. A damaged record counts as a file: it can be replaced."""
        try:
            return kind_of(stat(self.store, self.path))
        except CorruptionError:
            return "file"
        except NotFoundError:
            return None

    def file_above(self) -> str | None:
        """Return the location of the file in place of a directory above this path, or None."""
        above = self.path.rpartition("/")[0]
        while above:
            kind = StorePlace(self.url, self.store, above).kind()
            if kind is not None:
                return self.store.where(above) if kind == "file" else None
            above = above.rpartition("/")[0]
        return None

    def taken(self) -> dict[str, Kind]:
        """Return the kind of every entry below, by relative path."""
        entries = find(self.store, self.path, detail=False)
        return {self.relative(entry.path): kind_of(entry) for entry in entries}

    def entries(self) -> list[Entry]:
        """Return every entry below, for a copy: the files of each checkpoint are those of one save.

        Raises:
            ConflictError: The checkpoints are saved again and again while they are listed.
        """
        before: dict[str, bytes] = {}
        for _ in range(_LISTINGS_MAX):
            entries = find(self.store, self.path)
            roots = {
                each.path: each.manifest.write_id for each in entries if each.manifest and each.path.endswith(ROOT)
            }
            # A checkpoint's files are there before its metadata. So a listing between two looks at one version of the
            # metadata has them all.
            if roots.items() <= before.items():
                return entries
            before = roots
        raise ConflictError(
            f"{self.url} was saved again each time it was listed: copy it when the saves are less frequent",
            path=self.url,
        )

    def contents(self) -> Iterator[tuple[str, FileContent | None]]:
        """Yield relative path and content of every entry below. A directory has None, and precedes its entries."""
        for entry in self.entries():
            relative = self.relative(entry.path)
            yield relative, None if entry.is_directory else stored_content(self.store, entry)

    def content(self) -> FileContent:
        """Return the content of the file here. Raises as `entry` does."""
        return stored_content(self.store, self.entry())

    def check_file(self) -> None:
        """Check that a file can be here. Raise `InvalidInputError` for the store's root."""
        if not self.path:
            raise InvalidInputError(f"{self.url} is the root of a store: name a file in it", path=self.url)

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None = None) -> None:
        """Write the file here. Unless this returns, its previous content stays."""
        fill_stored(self.store, self.path, pieces, metadata)

    def make_directory(self) -> None:
        make_directory(self.store, self.path, exist_ok=True)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A path on this host.

    Attributes:
        url: The path that the user wrote, or a path below it.
    """

    url: str

    @property
    def name(self) -> str:
        """Last component of the path; empty for ``.``, ``..`` and ``/``."""
        name = os.path.basename(self.url.rstrip("/"))
        return "" if name in (".", "..") else name

    def child(self, relative: str) -> LocalPlace:
        return LocalPlace(os.path.join(self.url, relative)) if relative else self

    def kind(self) -> Kind | None:
        """Return the kind of the entry here, or None."""
        if os.path.isdir(self.url):
            return "directory"
        return "file" if os.path.exists(self.url) else None

    def missing(self) -> NotFoundError:
        """Return the error for a path with nothing there."""
        return NotFoundError(
            f"{self.url} does not exist on this host: a path in a store starts with tierfs:: or tierfs://",
            path=self.url,
        )

    def contents(self) -> Iterator[tuple[str, FileContent | None]]:
        """Yield relative path and content of every entry below. A directory has None, and precedes its entries."""
        for relative, size in walk(self.url):
            yield relative, None if size is None else local_content(os.path.join(self.url, relative), size)

    def content(self) -> FileContent:
        return local_content(self.url, known_size(self.url))

    def check_file(self) -> None:
        """Do nothing: the filesystem says what cannot be a file."""

    def fill(self, pieces: Iterable[memoryview], _metadata: Mapping[str, object] | None = None) -> None:
        """Write the file here. Unless this returns, its previous content stays."""
        fill_local(self.url, pieces)

    def make_directory(self) -> None:
        os.makedirs(self.url, exist_ok=True)


def names_checkpoint(text: str) -> bool:
    """Return whether a path or URL may name the latest or the best checkpoint of a run."""
    return _LATEST_OR_BEST.search(text.rstrip("/")) is not None


def settled(text: str) -> str:
    """Return an argument that programs can open, with the checkpoint that ``latest`` or ``best`` at its end names now."""
    if not names_checkpoint(text):
        return text
    name = store_place(text).name
    return _LATEST_OR_BEST.sub(lambda end: f"{end[1]}{name}", text.rstrip("/"))


def kind_of(entry: Entry) -> Kind:
    return "directory" if entry.is_directory else "file"


FilePlace: TypeAlias = StorePlace | LocalPlace


def store_place(
    text: str,
    *,
    write: bool = False,
    is_new: bool = False,
    as_configured: bool = False,
    bare: bool = False,
    resumes: bool = True,
) -> StorePlace:
    """Open the store that an argument names, and return the place in it.

    Args:
        text: ``tierfs::URL``, ``tierfs://NAME/path``, the object tier's own URL, or a local path.
        write: Whether the command is going to write. Then a missing store is created if the configuration or
            ``TIERFS_CREATE=1`` asks for it. A command that reads goes on without local tiers that cannot be used.
        is_new: Whether the path need not exist, so that ``latest`` and ``best`` are names like others.
        as_configured: Whether to use the local tiers as configured. Otherwise writes return at level ``object``, and
            reads keep no chunks in the local tiers.
        bare: Whether to open the store without local tiers. A copy of a store that this host knows has none here.
        resumes: Whether to start a flusher if earlier processes left changes pending.

    Raises:
        InvalidInputError: The argument is invalid.
        StoreNotFoundError: No store contains the path.
        TierfsError: The store could not be opened.
    """
    location = replace(parse_url(text), resumes=resumes, needs_tiers=write)
    if bare:
        location = replace(location, tiers=NO_TIERS.over(location.tiers))
    store, path = open_store(location, write=write, create=write and asks_to_create(location))
    if not as_configured:
        store.ack = Level.OBJECT
        if store.tiers is not None:
            store.tiers.cache.keeps_reads = False
    url = text.rstrip("/") if text.startswith("tierfs://") else f"tierfs::{location.url}"
    place = StorePlace(url, store, path)
    return place if write or is_new else place.resolved()


def whole_store(text: str, command: str, *, as_configured: bool = False) -> Store:
    """Open the store that an argument names, for a command that works on a whole store.

    Raises:
        InvalidInputError: The argument is invalid, or names a path below the store's root.
        StoreNotFoundError, TierfsError: As in `store_place`.
    """
    place = store_place(text, as_configured=as_configured)
    if place.path:
        raise InvalidInputError(f"{command} works on a whole store: name its root, {place.store.url}", path=place.url)
    return place.store


def any_place(text: str, *, write: bool = False, is_new: bool = False) -> FilePlace:
    """Return the place of an argument that may be local. Only an argument that starts with ``tierfs`` is in a store.

    Raises:
        InvalidInputError, StoreNotFoundError, TierfsError: As in `store_place`.
    """
    if text.startswith("tierfs:"):
        return store_place(text, write=write, is_new=is_new)
    check_path(text)
    if _URL.match(text):
        raise InvalidInputError(
            f"{text!r} is not a local path: write tierfs::{text} for a path in a store, ./{text} for a local file",
            path=text,
        )
    return LocalPlace(text)


def requests_of(store: Store) -> dict[str, int]:
    """Count the requests that this process has sent to the store's object tier, by method."""
    counts = request_metrics(store.objects)["object_requests"]
    return {method: int(count["requests"]) for method, count in counts.items()}


def sent_bytes(store: Store) -> int:
    """Count the bytes that this process has sent to the store's object tier."""
    counts = request_metrics(store.objects)["object_requests"]
    return sum(int(count["bytes"]) for method, count in counts.items() if method.startswith("put"))


def named_path(place: StorePlace, text: str) -> str:
    """Return the path in a place's store that an argument names: relative to the place, or a URL or absolute path.

    Raises:
        InvalidInputError: The argument is empty.
    """
    if text.startswith("/") or "::" in text or "://" in text:
        other = find_store(text)
        if other is not None and other.store is place.store:
            return other.path
    name = text.strip("/")
    return place.child(name).resolved().path


def find_store(text: str) -> StorePlace | None:
    """Return the result of `store_place`, or None if no store contains the path."""
    try:
        return store_place(text)
    except StoreNotFoundError:
        return None


_NOTHING_PROMISED = Capabilities(
    conditional_create=False,
    conditional_update=False,
    list_after_write=False,
    atomic_put=False,
    # No local tier keeps copies of its bytes.
    host_local=True,
)


def source_of(text: str) -> StorePlace:
    """Return the place that an argument names. It may be outside any store unless it begins with ``tierfs:``.

    Raises:
        InvalidInputError: The argument is invalid.
        StoreNotFoundError: It begins with ``tierfs:``, and no store contains it.
        TierfsError: The store could not be opened.
    """
    place = store_place(text) if text.startswith("tierfs:") else find_store(text)
    if place is not None:
        return place
    location = parse_url(text)
    return StorePlace(location.url, *plain_store(location)).resolved()


def plain_store(location: Location) -> tuple[Store, str]:
    """Present the directory around a location as a store whose files tierfs did not write. Use it for reading only.

    Nothing is looked up yet.

    Returns:
        The store and the path of the location in it. The store's root is the parent directory, if there is one.

    Raises:
        InvalidInputError: The filesystem is unknown, or it refuses its options.
    """
    above, _, name = location.path.rpartition("/")
    root, path = (above, name) if above else (location.path, "")
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, _NOTHING_PROMISED)
    store = Store(
        connect(location.protocol, root, location.options), descriptor, url=target_url(location.protocol, root)
    )
    return store, path
