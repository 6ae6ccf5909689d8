"""Where a checkpoint is, as a user writes it: enough to open the store there, in this process or another."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.session.url import LOCAL, asks_to_create
from tierfs.store import Store

__all__ = ["Address", "full_url"]

_CHAIN = "tierfs::"
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+._-]+):/(?!/)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, and what is set for it by arguments. Small and picklable; nothing is opened before `open`.

    Attributes:
        url: ``tierfs::s3://bucket/run/step_10``, ``tierfs://NAME/run/step_10``, the object tier's own URL, or a local path;
            as `full_url` gives it.
        tiers: How the local tiers are set up.
        options: For the object tier's filesystem.
        create: Whether the store is made by the first write; ``None`` for what environment and configuration say.
    """

    url: str
    tiers: TierOptions = field(default_factory=TierOptions)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    create: bool | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Address:
        """From what a user hands to a writer or reader.

        Args:
            path: The checkpoint's directory.
            options: Those of `TierOptions`, ``create``, and one mapping per protocol (``s3={...}``), as for
                ``fsspec.url_to_fs``.

        Raises:
            InvalidInputError: An option is unknown, or the URL is no good.
        """
        url = full_url(path)
        protocol = parse_url(url).protocol
        given = dict(options)
        tiers = TierOptions(**{name: given.pop(name) for name in TierOptions.names() if name in given})
        create, target = given.pop("create", None), given.pop(protocol, {})
        if given:
            raise InvalidInputError(
                f"unknown option {min(given)!r}: there are 'create', {', '.join(map(repr, TierOptions.names()))}, and "
                f"{protocol!r} with a mapping of options for that filesystem"
            )
        if tiers.ack is not None:
            Level.parse(tiers.ack)
        return cls(url, tiers, dict(target), create)

    def at(self, path: str | os.PathLike[str]) -> Address:
        """Another place with the same options."""
        return replace(self, url=full_url(path))

    def open(self, *, write: bool = False) -> tuple[Store, str]:
        """The store that holds it, and the path in there.

        Raises:
            StoreNotFoundError: There is none.
            StoreError, ReadOnlyError, CorruptionError, FormatError, InvalidInputError: As `open_store` does.
        """
        location = parse_url(self.url)
        location = replace(location, options={**location.options, **self.options}, tiers=self.tiers)
        create = write and (asks_to_create(location) if self.create is None else self.create)
        return open_store(location, write=write, create=create)


def full_url(path: str | os.PathLike[str]) -> str:
    """A URL as it was meant: what is written here loses slashes in a `pathlib.Path`, or is a path of this host.

    ``tierfs::s3:/bucket/run`` is ``tierfs::s3://bucket/run``; ``tierfs::/data/run`` is ``tierfs::file:///data/run``, and what
    is relative to the working directory likewise. All else is what it is.
    """
    text = os.fspath(path)
    if not text.startswith(_CHAIN):
        return text.replace("tierfs:/", "tierfs://", 1) if re.match("tierfs:/(?!/)", text) else text
    rest = text[len(_CHAIN) :]
    if (cut := _ONE_SLASH.fullmatch(rest)) is not None:
        return f"{_CHAIN}{cut[1]}://{'/' if cut[1] in LOCAL else ''}{cut[2]}"
    if not rest or "://" in rest or "::" in rest:
        return text
    return f"{_CHAIN}file://{os.path.abspath(rest)}"
