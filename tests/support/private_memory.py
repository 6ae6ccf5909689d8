"""A memory filesystem whose files no other instance sees.

fsspec has ``global_store=False`` for that, but its oldest supported version does not.
"""

from __future__ import annotations

from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class PrivateMemory(MemoryFileSystem):  # type: ignore[misc]
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
