"""Plain tensors that describe the shards of a larger tensor that they hold: torch's ``CheckpointableTensor`` (2.14).

torch plans such a tensor by four of its attributes, so a copy needs them too. An older torch ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def holds_shards(tensor: Any) -> bool:
    """Return whether a tensor describes shards."""
    return hasattr(tensor, _FIELDS[0]) and all(hasattr(tensor, name) for name in _FIELDS)


def shards_of(tensor: Any) -> dict[str, Any] | None:
    """Return a tensor's own description of its shards; ``None`` for any other tensor."""
    return {name: getattr(tensor, name) for name in _FIELDS} if holds_shards(tensor) else None


def mark_shards(copied: Any, shards: Mapping[str, Any] | None) -> Any:
    """Set the description of the shards on a copy of a tensor, and return the copy."""
    if shards is not None:
        for name, value in shards.items():
            setattr(copied, name, value)
    return copied
