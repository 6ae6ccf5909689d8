"""The `UPath` for ``tierfs::`` URLs. universal_pathlib loads this module by itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import fsspec
from upath import UPath
from upath._flavour import WrappedFileSystemFlavour

fsspec.get_filesystem_class("tierfs")  # load it: `UPath` splits URLs by the rules of loaded filesystems


class TierPath(UPath):
    """A path whose text is its URL.

    For `UPath`, a chained URL has two paths: one of tierfs and one of the object tier. They are the same
    here. `UPath` keeps the second one (``fo``) unchanged when it makes a parent or a child, so `storage_options` leaves
    it out.
    """

    __slots__ = ()

    @property
    def storage_options(self) -> Mapping[str, Any]:
        given = self._storage_options.items()
        return MappingProxyType({name: value for name, value in given if name != "fo" and value is not None})

    @property
    def parser(self) -> Any:
        """The rules for paths of the object tier. `UPath` would have others for a path that it made from another."""
        return WrappedFileSystemFlavour.from_protocol(self._storage_options.get("target_protocol") or "tierfs")

    @property
    def drive(self) -> str:
        return "" if self._relative_base is not None else str(self.parser.splitroot(self.path)[0])

    @property
    def root(self) -> str:
        return "" if self._relative_base is not None else str(self.parser.splitroot(self.path)[1])

    def __str__(self) -> str:
        target = self.storage_options.get("target_protocol")
        if self._relative_base is not None:
            return str(super().__str__())
        return f"tierfs://{self.path}" if target is None else f"tierfs::{target}://{self.path}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TierPath):
            return NotImplemented
        return str(self) == str(other) and self.storage_options == other.storage_options

    def __hash__(self) -> int:
        return hash(str(self))
