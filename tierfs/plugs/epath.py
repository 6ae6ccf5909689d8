"""etils' ``epath.Path`` for tierfs URLs, and so Orbax's metadata and JSON in a store. Call `register` once."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath
from etils.epath import backend, gpath

from tierfs.errors import InvalidInputError


def register() -> None:
    """Let ``epath.Path`` take tierfs URLs, and let Orbax refuse to write arrays to them. Call it once."""
    epath.register_path_cls(["tierfs://", *(f"tierfs::{name}://" for name in fsspec.available_protocols())])(TierGPath)
    if importlib.util.find_spec("orbax") and importlib.util.find_spec("orbax.checkpoint"):
        _refuse_arrays()


def _refuse_arrays() -> None:
    from orbax.checkpoint._src.serialization import tensorstore_utils  # noqa: PLC0415 - it imports jax

    build = tensorstore_utils.build_kvstore_tspec

    def build_for_paths(directory: Any, *arguments: Any, **options: Any) -> Any:
        if str(directory).startswith("tierfs:"):
            hint = "mount the store with `tierfs mount`, and give Orbax a path in the mount"
            raise InvalidInputError(f"Orbax keeps arrays with tensorstore, which cannot use {directory}: {hint}")
        return build(directory, *arguments, **options)

    tensorstore_utils.build_kvstore_tspec = build_for_paths


class TierGPath(gpath.PosixGPath):
    """A path in a store. Its parts are those of ``/tierfs::s3:/bucket/run``, and it prints as its URL."""

    if sys.version_info < (3, 12):

        def __new__(cls, *parts: Any) -> Any:
            return super().__new__(cls, *_absolute(parts))

    else:

        def __init__(self, *parts: Any) -> None:
            super().__init__(*_absolute(parts))

    def resolve(self, strict: bool = False) -> Any:
        return self if self._uri_scheme is not None else super().resolve(strict)

    @property
    def _uri_scheme(self) -> str | None:
        parts = self.parts
        return parts[1][:-1] if len(parts) > 1 and parts[1].startswith("tierfs:") else None

    @property
    def _path_str(self) -> str:
        if (scheme := self._uri_scheme) is None:
            return str(super()._path_str)
        slash = "/" if scheme.endswith((":file", ":local", ":memory")) else ""  # their URLs have three slashes
        return f"{scheme}://{slash}{'/'.join(self.parts[2:])}"

    @property
    def _backend(self) -> Any:
        return super()._backend if self._uri_scheme is None else _BACKEND


def _absolute(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts of a URL as one absolute path, and other parts as they are."""
    scheme, separator, rest = "/".join(map(os.fspath, parts)).partition("://")
    is_ours = separator and f"{scheme}:".startswith("tierfs:")
    return (f"/{scheme}:/{rest.lstrip('/')}",) if is_ours else parts


class _TierBackend(backend._FileSystemSpecBackend):
    def fs(self, path: Any) -> Any:
        return fsspec.url_to_fs(os.fspath(path))[0]

    def glob(self, path: Any) -> list[str]:
        return [self.fs(path).unstrip_protocol(found) for found in self.fs(path).glob(os.fspath(path))]

    def walk(self, top: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for found, directories, files in super().walk(top, **options):
            yield self.fs(top).unstrip_protocol(found), directories, files


_BACKEND = _TierBackend()
