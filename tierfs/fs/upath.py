"""The `UPath` for ``tierfs::`` URLs. universal_pathlib loads this module by itself."""

from __future__ import annotations

from typing import Any

import fsspec
from upath import UPath

fsspec.get_filesystem_class("tierfs")  # load it: `UPath` splits URLs by the rules of loaded filesystems


class TierPath(UPath):
    """A path whose text is its URL.

    For `UPath`, a chained URL has two paths: one of tierfs and one of the object tier. They are the same
    here. `UPath` keeps the second one (``fo``) unchanged when it makes a parent or a child, so comparisons ignore it.
    """

    __slots__ = ()

    def __str__(self) -> str:
        target = self.storage_options.get("target_protocol")
        if self._relative_base is not None:
            return str(super().__str__())
        return f"tierfs://{self.path}" if target is None else f"tierfs::{target}://{self.path}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TierPath):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(str(self))

    def _identity(self) -> tuple[str, dict[str, Any]]:
        return str(self), {name: value for name, value in self.storage_options.items() if name != "fo"}
