"""The address of a checkpoint, as a user writes it: enough to open the store there, in this process or another."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tierfs.errors import InvalidInputError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.session.url import LOCAL, asks_to_create
from tierfs.store import Store
from tierfs.store.write.staging import expect_changes
from tierfs.threads import start_daemon

AHEAD_S = 0.1
FORK_S = 10.0
_CHAIN = "tierfs::"
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+._-]+):/(?!/)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    """A URL and the options that arguments set for it. Small and picklable; nothing is opened before `open`.

    Attributes:
        url: ``tierfs::s3://bucket/run/step_10``, ``tierfs://NAME/run/step_10``, the object tier's own URL, or a local
            path; as `full_url` returns it.
        tiers: Options of the local tiers.
        options: Options for the object tier's filesystem.
        create: Whether the first write creates the store; ``None`` takes the environment's or the configuration's
            value.
    """

    url: str
    tiers: TierOptions = field(default_factory=TierOptions)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    create: bool | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Address:
        """Return the address for the arguments of a writer or reader.

        Options are those of `TierOptions`, ``create``, and one mapping per protocol (``s3={...}``), as for
        ``fsspec.url_to_fs``.

        Raises:
            InvalidInputError: An option is unknown, or the URL is invalid.
        """
        url = full_url(path)
        protocol = parse_url(url).protocol
        given = dict(options)
        tiers = TierOptions(**{name: given.pop(name) for name in TierOptions.names() if name in given})
        create, target = given.pop("create", None), given.pop(protocol, {})
        if given:
            raise InvalidInputError(
                f"unknown option {min(given)!r}: valid are 'create', {', '.join(map(repr, TierOptions.names()))}, and "
                f"{protocol!r} with a mapping of options for that filesystem"
            )
        if tiers.ack is not None:
            Level.parse(tiers.ack)
        return cls(url, tiers, dict(target), create)

    def at(self, path: str | os.PathLike[str]) -> Address:
        """Return the address of another directory with the same options."""
        return replace(self, url=full_url(path))

    def open(self, *, write: bool = False, is_checked: bool = True) -> tuple[Store, str]:
        """Return the store that holds the checkpoint, and the checkpoint's path in it.

        Args:
            write: Whether the caller writes. Then a missing store may be made.
            is_checked: Whether a store that this process has open is checked, before a write, to still exist.

        Raises:
            StoreNotFoundError: No store is there.
            StoreError, ReadOnlyError, CorruptionError, FormatError, InvalidInputError: As `open_store` does.
        """
        location = parse_url(self.url)
        location = replace(location, options={**location.options, **self.options}, tiers=self.tiers)
        create = write and (asks_to_create(location) if self.create is None else self.create)
        return open_store(location, write=write and is_checked, create=create)

    def open_ahead(self, begun: threading.Event, then: Callable[[Store], object] | None = None) -> None:
        """Open a remote store, and start its flusher, on another thread: otherwise the first save waits for both.

        Nothing is created in the store. Errors are left to that save, which meets them too. If ``begun`` is set within
        `AHEAD_S`, nothing is done: the save has begun, and would compete with this for the processors. Then call
        ``then`` with the store, which is opened for it even if it is not remote.
        """
        is_remote = parse_url(self.url).is_remote
        work = partial(self._open_ahead, begun, expect_changes if is_remote else None, then)
        if (is_remote or then is not None) and (thread := start_daemon(work, name="open-ahead")):
            _ahead.add(thread)

    def _open_ahead(self, begun: threading.Event, *calls: Callable[[Store], object] | None) -> None:
        if not begun.wait(AHEAD_S):
            with contextlib.suppress(TierfsError):
                store = self.open()[0]
                for call in filter(None, calls):
                    call(store)


_ahead: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _finish_ahead() -> None:
    """Wait before a fork, of a loader's worker for example: a child waits forever for a module half imported here."""
    for thread in set(_ahead) - {threading.current_thread()}:
        thread.join(FORK_S)


os.register_at_fork(before=_finish_ahead, after_in_child=_ahead.clear)


def full_url(path: str | os.PathLike[str]) -> str:
    """Return the full form of a URL that lost slashes in a `pathlib.Path`, or that is a path of this host.

    ``tierfs::s3:/bucket/run`` becomes ``tierfs::s3://bucket/run``. ``tierfs::/data/run`` becomes
    ``tierfs::file:///data/run``; a path relative to the working directory is made absolute too. Any other
    path stays as it is.
    """
    text = os.fspath(path)
    if not text.startswith(_CHAIN):
        return text.replace("tierfs:/", "tierfs://", 1) if re.match("tierfs:/(?!/)", text) else text
    rest = text[len(_CHAIN) :]
    if (cut := _ONE_SLASH.fullmatch(rest)) is not None:
        return f"{_CHAIN}{cut[1]}://{'/' if cut[1] in LOCAL else ''}{cut[2]}"
    if not rest or "://" in rest or "::" in rest:
        return text
    return f"{_CHAIN}file://{parse_url(rest).path}"
