"""From names and paths to the nested state they were taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierfs.errors import InvalidInputError

__all__ = ["nested"]


class _Node(dict[object, Any]):
    """A container in the making, told from mappings that are values."""


def nested(values: Mapping[str, Any], paths: Mapping[str, Sequence[object]] | None) -> dict[object, Any]:
    """Put values where they were in the state.

    Args:
        values: By name.
        paths: By name, the path of each: strings for keys of mappings, integers for places in lists. A container whose
            keys are 0, 1, 2 and so on becomes a list, any other a mapping. A name without a path stays at the top.

    Raises:
        InvalidInputError: Two values have one path, or one lies inside of another.
    """
    root = _Node()
    for name, value in values.items():
        path = tuple((paths or {}).get(name) or (name,))
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, _Node())
            if not isinstance(node, _Node):
                raise InvalidInputError(f"{name!r} lies at {list(path)}, inside of another value of the checkpoint")
        if path[-1] in node:
            raise InvalidInputError(f"{name!r} lies at {list(path)}, where another value of the checkpoint is")
        node[path[-1]] = value
    return {key: _finished(value) for key, value in root.items()}


def _finished(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if all(type(key) is int for key in value) and set(value) == set(range(len(value))):
        return [_finished(value[place]) for place in range(len(value))]
    return {key: _finished(inner) for key, inner in value.items()}
