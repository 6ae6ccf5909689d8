"""`UPath` of universal_pathlib for ``tierfs::`` URLs, which loads this module by itself where it is installed."""

from __future__ import annotations

from typing import Any

import fsspec
from upath import UPath

__all__ = ["TierPath"]

fsspec.get_filesystem_class("tierfs")  # which `UPath` looks for among those that are loaded, to cut URLs as it does


class TierPath(UPath):
    """A path whose text is its URL.

    A chained URL has two paths for `UPath`, here the same: that of tierfs, and that of the object tier behind it, which
    `UPath` leaves as it was when it goes to a parent or a child.
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
