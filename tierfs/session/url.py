"""Resolve the locations that users write: URL forms, named stores, the configuration file.

==============================  ================================================================
``tierfs::s3://bucket/run/x``   the object tier's own URL, after ``tierfs::``
``tierfs://NAME/run/x``         a store named in the configuration file, and a path in it
==============================  ================================================================

The configuration file is ``$TIERFS_CONFIG``, else ``~/.config/tierfs/config.toml``::

    [stores.prod]
    url = "s3://bucket/runs"
    create = true               # make the store at the first write
    ack = "local"               # and ram, nvme, state_dir, timeout, bandwidth, codecs: see `tierfs.session.settings`
    [stores.prod.options]       # for the object tier's own filesystem
    endpoint_url = "https://..."
    [tiers]                     # the same settings, for all stores
    ram = "25%"
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierfs.errors import InvalidInputError, without_passwords
from tierfs.session.settings import TierOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCAL = ("file", "local")
TRUE = ("1", "true", "yes", "on")
_TABLES = {"stores", "tiers"}
_logger = logging.getLogger("tierfs.store")
_CHAIN = "tierfs::"
_NAMED = "tierfs://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ABSOLUTE = re.compile("(?:(?:file|local)://)?(/.*)", re.DOTALL)
_PROTOCOL = re.compile(r"([a-z][a-z0-9+._-]+)://")
_ALMOST = re.compile(r"\s*(?:tierfs:+/*)?([a-z][a-z0-9+._-]+)(?::+/*|//)((?:(?!::|://).)*)", re.IGNORECASE | re.DOTALL)
_FORMS = "tierfs::file:///absolute/path, tierfs::s3://bucket/path or tierfs://NAME/path"
# The first name in a path with a character that Python's parser of URLs drops or reads as the start of a query.
_LITERAL = re.compile(r"/+[^/]*[\t\n\r#?]")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a path in an object tier.

    Attributes:
        protocol: fsspec's name of the object tier's filesystem.
        path: The path as that filesystem writes it, without the protocol and without a ``/`` at its end.
        options: For that filesystem.
        create: Whether the configuration asks for the store to be made at the first write.
        root: Where the store would be made; empty if that follows from the path.
        tiers: Settings of the local tiers from arguments.
        configured: Settings of the local tiers that the configuration has for a named store.
        resumes: Whether opening the store starts a flusher for changes that other processes left pending.
        needs_tiers: Whether it is an error if local tiers that the user asked for cannot be used.
    """

    protocol: str
    path: str
    options: Mapping[str, object] = field(default_factory=dict)
    create: bool = False
    root: str = ""
    tiers: TierOptions = field(default_factory=TierOptions)
    configured: TierOptions = field(default_factory=TierOptions)
    resumes: bool = True
    needs_tiers: bool = True

    @property
    def is_process_local(self) -> bool:
        """Whether the object tier belongs to this process alone."""
        return self.protocol == "memory"

    @property
    def is_remote(self) -> bool:
        """Whether the object tier is neither a directory of this host nor memory of this process."""
        return self.protocol not in LOCAL and not self.is_process_local

    @property
    def url(self) -> str:
        """The path as the object tier's URL, without options."""
        return target_url(self.protocol, self.path)


def target_url(protocol: str, path: str) -> str:
    """Return a path as a URL to show, without its password. fsspec's web filesystems have whole URLs as paths."""
    return without_passwords(path if path.startswith(f"{protocol}://") else f"{protocol}://{path}")


def split_url(url: str) -> tuple[str | None, str]:
    """Split a URL into the object tier's protocol and path; ``None`` stands for a named store or a bare path.

    Raises:
        InvalidInputError: The URL is an unsupported chain, or no valid Unicode.
    """
    try:
        url.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"bad path {url!r}: it is not valid Unicode") from None
    if url.startswith(_CHAIN) and _PROTOCOL.match(url, len(_CHAIN)):
        url = url[len(_CHAIN) :]
    elif url.startswith(_NAMED):
        if "::" in url:
            raise InvalidInputError(f"{url!r} names a store twice: write tierfs://NAME/path or tierfs::URL")
        path = url[len(_NAMED) :].rstrip("/")
        if path.startswith("/"):
            raise InvalidInputError(
                f"{url!r} names no store: write tierfs::file:///{path.lstrip('/')} for a local directory, or tierfs://NAME/path for a "
                "store that the configuration file names"
            )
        return None, path
    elif url.startswith(_CHAIN[:-1]):
        raise InvalidInputError(f"{url!r} names no store: write {_meant(url) or _FORMS}")
    if "::" in url and _PROTOCOL.search(url):
        meant = f"write {_meant(url)}" if _meant(url) else "name the object tier itself"
        raise InvalidInputError(f"{url!r}: a chain behind tierfs:: is not supported: {meant}")
    match = _PROTOCOL.match(url)
    if match is None:
        return None, url
    return match[1], strip(match[1], url)


def check_path(text: str) -> None:
    """Check that a local path is not meant as a URL: ``s3:/bucket/run``, ``s3//bucket/run``, ``S3://bucket/run``.

    Raises:
        InvalidInputError: It begins with the name of a filesystem of fsspec, and no directory has that name.
    """
    first = text.partition("/")[0]
    if (meant := _meant(text)) and (":" in first or not os.path.lexists(first)):
        raise InvalidInputError(f"{text!r} is not a URL: write {meant}, or ./{text} for a path of this host")


def _meant(text: str) -> str:
    """Return the URL that a text is nearly; empty if it does not begin with the name of a filesystem of fsspec."""
    found = _ALMOST.fullmatch(text)
    if found is None:
        return ""
    import fsspec  # noqa: PLC0415

    protocol = found[1].lower()
    known = protocol in fsspec.available_protocols() and protocol != "tierfs"
    return f"{_CHAIN}{protocol}://{'/' * (protocol in LOCAL)}{found[2].lstrip('/')}" if known else ""


def strip(protocol: str, path: str) -> str:
    """Return a path in the canonical form of this filesystem.

    Raises:
        InvalidInputError: fsspec has no such filesystem, or its package is missing.
    """
    absolute = _ABSOLUTE.fullmatch(path) if protocol in LOCAL else None
    if absolute is not None:  # fsspec leaves such a path unchanged, and importing it takes 50 ms and 7 MiB
        return re.sub("/+", "/", absolute[1]).rstrip("/") or "/"
    if not protocol:
        raise InvalidInputError(f"tierfs::{path} names no store: write {_FORMS}")
    import fsspec  # noqa: PLC0415

    parsed, literal = _split_literal(path)
    try:
        stripped = fsspec.get_filesystem_class(protocol)._strip_protocol(parsed)
    except (ValueError, ImportError) as error:
        raise InvalidInputError(f"{path!r}: {error}") from None
    text = f"{stripped.rstrip('/')}{literal}" if literal else str(stripped)
    if protocol in LOCAL:
        text = re.sub("/+", "/", text)
    return text.rstrip("/") or ("/" if text.startswith("/") else "")


def _split_literal(path: str) -> tuple[str, str]:
    """Split a path or URL before the first name that a parser of URLs would cut. adlfs and others use such a parser."""
    match = _PROTOCOL.match(path)
    found = _LITERAL.search(path, match.end() if match else 0)
    return (path, "") if found is None else (path[: found.start()], path[found.start() :])


def parse_url(url: str) -> Location:
    """Return the location of a URL or a local path.

    Raises:
        InvalidInputError: The URL is invalid, or the configuration has no store of this name.
    """
    protocol, path = split_url(url)
    if protocol is not None:
        if protocol in LOCAL:
            return Location(protocol, path)
        import fsspec  # noqa: PLC0415

        parsed, _ = _split_literal(url.removeprefix(_CHAIN))
        options = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(parsed)
        return Location(protocol, path, options)
    if url.startswith(_NAMED):
        return named_location(path)
    check_path(path)
    return Location("file", _resolve_dots(strip("file", path)))


def _resolve_dots(path: str) -> str:
    """Resolve ``.`` and ``..`` in an absolute local path as the kernel does. Links behind the last ``..`` stay."""
    parts = [part for part in path.split("/") if part != "."]
    if ".." not in parts:
        return "/".join(parts) or "/"
    end = len(parts) - parts[::-1].index("..")
    return os.path.join(os.path.realpath("/".join(parts[:end])), *parts[end:])


def asks_to_create(location: Location) -> bool:
    """Return whether to make a store at the first write: as the environment says, else as the configuration says.

    Not cached, because the environment may change while filesystem instances exist.
    """
    wish = os.environ.get("TIERFS_CREATE")
    return wish.lower() in TRUE if wish else location.create


def named_location(path: str) -> Location:
    """Return the location of ``NAME/path`` in the configuration file.

    Raises:
        InvalidInputError: The file has no such name, or is unreadable or invalid.
    """
    name, _, rest = path.partition("/")
    file_path = _configuration_path()
    hint = f'put this into {file_path}:\n[stores.{name}]\nurl = "s3://bucket/path"'
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} is not the name of a store: write tierfs://NAME/path, or tierfs::URL for a URL"
        )
    configuration = _configuration()
    if configuration is None:
        raise InvalidInputError(f"no store is named {name!r}: there is no {file_path}; {hint}")
    stores = configuration.get("stores", {})
    entry = stores.get(name) if isinstance(stores, dict) else None
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise InvalidInputError(f"no store is named {name!r} in {file_path}; {hint}")
    unknown = sorted(set(entry) - {"url", "create", "options", *TierOptions.names()})
    options = entry.get("options", {})
    create = entry.get("create", False)
    if unknown or not isinstance(options, dict) or not isinstance(create, bool):
        problem = f"unknown key {unknown[0]!r}" if unknown else "'options' must be a table and 'create' true or false"
        raise InvalidInputError(f"{file_path}: stores.{name}: {problem}")
    if entry["url"].startswith(_NAMED):
        raise InvalidInputError(f"{file_path}: stores.{name}: its url must be the object tier's own")
    target = parse_url(entry["url"])
    inside = f"{target.path}/{rest}".rstrip("/") if rest else target.path
    given = {key: value for key, value in entry.items() if key in TierOptions.names()}
    tiers = TierOptions.from_mapping(given, f"{file_path}: stores.{name}")
    return Location(target.protocol, inside, {**target.options, **options}, create, root=target.path, configured=tiers)


def configured_tiers() -> TierOptions:
    """Return the configuration file's settings for the local tiers of all stores.

    A file that this user may not read counts as empty, and so does a missing one that ``TIERFS_CONFIG`` names. A warning
    is logged.

    Raises:
        InvalidInputError: The file is invalid.
    """
    path = _configuration_path()
    if not os.access(path, os.R_OK) and (os.environ.get("TIERFS_CONFIG") or _is_there(path)):
        problem = "cannot be read (permission denied)" if _is_there(path) else "is missing (TIERFS_CONFIG)"
        _logger.warning("%s %s: the local tiers are set up without it", path, problem)
        return TierOptions()
    table = (_configuration() or {}).get("tiers", {})
    where = f"{path}: tiers"
    if not isinstance(table, dict):
        raise InvalidInputError(f"{where} is not a table")
    return TierOptions.from_mapping(table, where)


def _configuration_path() -> Path:
    # Unlike `Path.expanduser`, this does not fail where a user has no home.
    return Path(os.path.expanduser(os.environ.get("TIERFS_CONFIG") or "~/.config/tierfs/config.toml"))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission to search a directory above it
        return True


def _configuration() -> dict[str, Any] | None:
    """Return the content of the configuration file; ``None`` if it is missing."""
    path = _configuration_path()
    try:
        with open(path, "rb") as file:
            configuration = dict(tomllib.load(file))
    except FileNotFoundError:
        return None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    if unknown := sorted(set(configuration) - _TABLES):
        raise InvalidInputError(f"{path}: unknown table {unknown[0]!r}; settings are in [tiers] and [stores.NAME]")
    return configuration
