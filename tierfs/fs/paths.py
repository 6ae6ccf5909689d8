"""The options of a filesystem instance, and the resolution of a path or URL to a store.

An instance takes paths of the object tier (``bucket/run/x``, ``/data/run/x``), or ``NAME/run/x`` for named stores.
Every method also takes a full URL. To find the store of a path, tierfs walks up from the path.

fsspec gives a filesystem that precedes another one in a chained URL the path of that other one: ``/data/run`` for
``tierfs::file:///data/run``. It does this for subclasses of ``ChainedFileSystem``, which is new in 2025.10. Earlier, it
does this for subclasses of ``CachingFileSystem``. The end of a transaction publishes its files in the order in which they
were opened.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.spec import _Cached
from fsspec.transaction import Transaction
from fsspec.utils import stringify_path

from tierfs._fork import PerProcess
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StoreNotFoundError
from tierfs.fs.writefile import WriteFile
from tierfs.host.pending.levels import Level
from tierfs.session import Location, TierOptions, open_store
from tierfs.session.settings import PEER_OPTIONS
from tierfs.session.url import LOCAL, TRUE, asks_to_create, check_path, named_location, split_url, strip
from tierfs.store import Store
from tierfs.threads import Transfers

_Out = TypeVar("_Out")

CALLS_MAX = 16
_logger = logging.getLogger("tierfs.fs")
_FALSE = ("", "0", "false", "no", "off")
_FSSPEC_OPTIONS = frozenset(
    {
        "use_listings_cache",
        "listings_expiry_time",
        "max_paths",
        "add_docs",
        "add_aliases",
        "protocol",
        "fs",
        "auto_mkdir",
    }
)
# Options of other fsspec filesystems that tune reading: ``fill_cache``, ``default_block_size``, ``max_gap``.
_HINT = re.compile("cache|caching|block|buffer|ahead|prefetch|concurren|size|gap")
try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:
    from fsspec.implementations.cached import CachingFileSystem as ChainedFileSystem


class TierTransaction(Transaction):
    """The files of a transaction, written and not published yet.

    Of several writes to a path, only the last is published. The files are published one after the other, each of them
    whole. If one fails, the files after it are discarded.
    """

    fs: Any

    def check(self, path: str, mode: str) -> None:
        """Refuse to open a file in a mode that depends on a file that this transaction has not published yet.

        Raises:
            AlreadyExistsError: The transaction has written the path already, and the mode is ``xb``.
            InvalidInputError: The transaction has written the path already, and the mode is ``ab``.
        """
        if mode == "wb" or not any(file.path == path and file.pending for file in self.files):
            return
        if mode == "xb":
            raise AlreadyExistsError(f"{path} was already written in this transaction", path=path)
        raise InvalidInputError(f"{path} is written in this transaction: append to it after the transaction", path=path)

    def complete(self, commit: bool = True) -> None:
        """Publish the files, or discard them.

        Raises:
            InvalidInputError: A file was not closed. No file is published.
            TierfsError: A file could not be published. The files before it are published.
        """
        unclosed = next((file.path for file in self.files if not file.closed), None)
        last = {file.path: file for file in self.files if file.pending}
        for file in self.files:
            if last.get(file.path) is not file:
                file.discard()
        fs = self.fs
        try:
            super().complete(commit=commit and unclosed is None)
        finally:  # fsspec before 2026.9 does not clean up if a file fails
            while self.files:
                self.files.popleft().discard()
            fs._intrans, fs._transaction, self.fs = False, None, None
        if commit and unclosed is not None:
            raise InvalidInputError(
                f"{unclosed} was not closed before the end of the transaction: none of its files is published",
                path=unclosed,
            )


class _Instances(_Cached):
    """Makes one instance for all URLs that differ only in their paths, so that these share stores and caches."""

    def mro(cls) -> list[type]:  # noqa: N805 - of a metaclass
        """Put `ChainedFileSystem` last, so that methods of fsspec's other classes take precedence over its own."""
        order = [base for base in super().mro() if base not in {ChainedFileSystem, object}]
        return [*order, ChainedFileSystem, object]

    def __call__(cls, *args: Any, fo: str = "", **options: Any) -> Any:  # noqa: N805
        if options.get("target_protocol", "") is None:
            del options["target_protocol"]
        if (":" in fo or "//" in fo) and options.get("target_protocol") in LOCAL:
            # fsspec takes the rest of ``tierfs::s3:/bucket`` for a path below the working directory.
            below = fo.removeprefix(f"{os.getcwd()}/")
            if not os.path.lexists(below.partition("/")[0]):
                check_path(below)
        instance = super().__call__(*args, **options)
        instance._first = instance._first or fo
        return instance


class PathSpace(AsyncFileSystem, ChainedFileSystem, metaclass=_Instances):
    """The base class of `TierFileSystem`, whose docstring describes the arguments.

    fsspec passes it the rest of a chained URL. ``_first`` is the path in the first chained URL of this instance; empty
    if no URL had one.
    """

    protocol = "tierfs"
    root_marker = ""
    transaction_type = TierTransaction
    _pid: int
    _first = ""
    __getattribute__ = object.__getattribute__  # `CachingFileSystem` overrides it

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fo: str = "",
        *,
        create: bool | str | None = None,
        ack: str | None = None,
        ram: str | int | None = None,
        nvme: str | int | None = None,
        state_dir: str | None = None,
        timeout: float | str | None = None,
        bandwidth: str | int | None = None,
        codecs: str | None = None,
        device: str | int | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        peers = {name: options.pop(name) for name in PEER_OPTIONS if name in options}
        unknown = sorted(name for name in set(options) - _FSSPEC_OPTIONS if not is_hint(name))
        if unknown:
            raise InvalidInputError(
                f"unknown option {unknown[0]!r} for tierfs: it takes 'create', "
                f"{', '.join(map(repr, TierOptions.names()))}, and fsspec's options"
            )
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size, **options)
        self._create = _flag(create)
        if ack is not None:
            Level.parse(ack)
        self._tier_options = TierOptions(
            ack,
            ram,
            nvme,
            None if state_dir is None else os.fspath(state_dir),
            timeout,
            bandwidth,
            codecs,
            device,
            **peers,
        )
        self._target_protocol = target_protocol
        self._target_options = dict(target_options or {})
        if target_protocol is not None:
            strip(target_protocol, "")
        self._local = threading.local()
        self._used: dict[str, str] = {}  # by the store's URL, the last path that was used in it
        self._first = fo
        # fsspec calls this on instances too. On an instance, a bare path is a path of the object tier.
        self._strip_protocol = self._strip  # type: ignore[method-assign]

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        # Otherwise fsspec before 2026.3 replaces the path of an unchained URL by an empty path.
        _, colon, rest = path.partition("://")
        return {"target_protocol": None} if colon and rest else {}

    @property
    def loop(self) -> Any:
        """The event loop. A forked child gets a new one, so that an inherited instance keeps working."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._loop = get_loop()
        return self._loop

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        _, stripped = split_url(stringify_path(path))
        return stripped.rstrip("/") or ("/" if stripped.startswith("/") else "")

    def _strip(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._strip(item) for item in path]
        text = "" if path is None else stringify_path(path)  # fsspec passes None for a URL without a path
        protocol, stripped = split_url(text)
        if protocol is None and not text.startswith("tierfs://"):
            if self._target_protocol is None:
                return stripped.strip("/")
            if self._target_protocol in LOCAL:
                check_path(stripped)
            return strip(self._target_protocol, stripped)
        if protocol != self._target_protocol and not (protocol in LOCAL and self._target_protocol in LOCAL):
            mine = f"tierfs::{self._target_protocol}://" if self._target_protocol else "tierfs://NAME"
            raise InvalidInputError(f"{text!r} is not on this filesystem, which is {mine}: use fsspec.url_to_fs for it")
        return stripped

    def unstrip_protocol(self, name: str) -> str:
        """Return the full URL of a path, with its password, if it has one: programs open it."""
        stripped = self._strip(name)
        if self._target_protocol is None:
            return f"tierfs://{stripped}"
        return f"tierfs::{self._target_protocol}://{stripped.removeprefix(f'{self._target_protocol}://')}"

    def _locate(self, path: str, *, write: bool = False) -> tuple[Store, str]:
        """Return the store that a path lies in, and the path relative to that store."""
        location = self._location(path, write=write)
        store, relative = open_store(location, write=write, create=write and self._may_create(location))
        self._used[store.url] = path
        return store, relative

    def _location(self, path: str, *, write: bool = False) -> Location:
        stripped = self._strip(path)
        if not stripped and self._target_protocol == "memory":
            stripped = "/"  # fsspec writes the root of this filesystem as an empty path
        if not stripped and not write:
            raise StoreNotFoundError(f"{self.unstrip_protocol('')} is not in a store: name a path in one")
        if self._target_protocol is None:
            location = named_location(stripped)
        else:
            location = Location(self._target_protocol, stripped, self._target_options)
        return location if self._tier_options == TierOptions() else replace(location, tiers=self._tier_options)

    def _note_absence(self, path: str, error: NotFoundError) -> None:
        """Log why a look-up finds nothing if no store is there, unless a write would create the store."""
        if not isinstance(error, StoreNotFoundError) or not self._strip(path) or self._may_create(self._location(path)):
            return
        above = self.unstrip_protocol(path).rpartition("/")[0]
        _logger.warning("%s; look-ups find nothing there", error, extra={"repeat_of": f"no store above {above}"})

    @property
    def _written(self) -> weakref.WeakSet[WriteFile]:
        """The handles that this thread opened for writing and that are still alive."""
        return self._local.__dict__.setdefault("written", weakref.WeakSet())  # type: ignore[no-any-return]

    def _only_store(self) -> Store:
        """Return the store that this instance has used. Raise `InvalidInputError` unless it is exactly one."""
        paths = list(self._used.values()) or [self._first]
        if paths == [""] or len(paths) > 1:
            names = ", ".join(sorted(self._used)) or "none yet"
            raise InvalidInputError(f"this filesystem has used several stores or none ({names}): name a path in one")
        return self._locate(paths[0])[0]

    def _may_create(self, location: Location) -> bool:
        if self._create is not None:
            return self._create
        return asks_to_create(location)

    def _names(self, path: str, relative: str, found: Iterable[str]) -> list[str]:
        """Return the names on this filesystem of paths found in the store at or below ``relative``.

        ``path`` is the caller's, and ``relative`` the same path in the store.
        """
        stripped = str(self._strip(path))
        above, start = stripped.rstrip("/"), len(relative)
        return [f"{above}/{below}" if (below := item[start:].strip("/")) else stripped for item in found]


def is_hint(name: str) -> bool:
    """Whether a keyword only tunes how files are read. tierfs ignores such keywords, because it has its own caches."""
    return _HINT.search(name) is not None


def _flag(value: bool | str | None) -> bool | None:
    """Parse an option that may be text, if it comes from fsspec's configuration. ``None`` means not given."""
    if value is None or str(value).lower() in TRUE:
        return None if value is None else True
    if str(value).lower() in _FALSE:
        return False
    raise InvalidInputError(f"'create' must be true or false, not {value!r}")


async def run_in_thread(function: Callable[..., _Out], *args: Any, **kwargs: Any) -> _Out:
    """Await ``function(*args, **kwargs)`` without blocking the event loop."""
    return await asyncio.wrap_future(_calls().submit(_call, functools.partial(function, *args, **kwargs)))


def _call(function: Callable[[], _Out]) -> _Out:
    return function()


# Not the threads that transfer chunks: these calls wait for those.
_calls = PerProcess(lambda: Transfers(CALLS_MAX, name="tierfs-call"))
