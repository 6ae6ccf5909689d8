"""A memory filesystem whose files nobody else sees: fsspec's own ``global_store=False`` came later than the oldest supported."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class PrivateMemory(MemoryFileSystem):  # type: ignore[misc]
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
