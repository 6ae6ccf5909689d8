"""Plain tensors that hold shards of a larger one and say so themselves: torch's ``CheckpointableTensor`` (2.14).

torch plans such a tensor by four attributes of it, so a copy of the tensor has to have them as well. An older torch does not look at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["holds_shards", "mark_shards", "shards_of"]

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def holds_shards(tensor: Any) -> bool:
    """Whether a tensor is one of them."""
    return hasattr(tensor, _FIELDS[0]) and all(hasattr(tensor, name) for name in _FIELDS)


def shards_of(tensor: Any) -> dict[str, Any] | None:
    """Its own description of its shards; ``None`` for any other tensor."""
    return {name: getattr(tensor, name) for name in _FIELDS} if holds_shards(tensor) else None


def mark_shards(copied: Any, shards: Mapping[str, Any] | None) -> Any:
    """A copy of a tensor, which says the same of its shards from now on."""
    if shards is not None:
        for name, value in shards.items():
            setattr(copied, name, value)
    return copied
