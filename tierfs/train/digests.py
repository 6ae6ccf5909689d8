"""Digests of a state, value by value: they compare a saved state with a live one, or two saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tierfs.dcp.save.replicas import RemoteReplica
from tierfs.dcp.tensorbytes import bytes_of
from tierfs.digest import CHUNK_BYTES, checksum

TENSOR, VALUE = "t", "v"
"""The first letter of a digest: of a tensor, or of another value."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf of a nested state. DCP's planners build the same names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list, torch.Tensor)) for inner in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def digests_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each value that this rank has, by name; for a sharded tensor, that of its local shard.

    Values that another rank saves, and values of types without a digest, are left out.
    """
    found = {}
    for name, value in leaves(state):
        digest = _digest(value)
        if digest is not None:
            found[name] = digest
    return found


def first_difference(first: Sequence[Mapping[str, str]], second: Sequence[Mapping[str, str]]) -> str:
    """Describe the first value in which two states differ; empty if they are the same.

    Args:
        first: For each rank its digests by name. A rank may lack the digest of a value that another rank saves.
        second: The digests of the other state.
    """
    if len(first) != len(second):
        return f"{len(first)} ranks in one, {len(second)} in the other"
    for rank, (mine, other) in enumerate(zip(first, second, strict=True)):
        for name, digest in mine.items():
            if name in other and other[name] != digest:
                return f"{name!r} of rank {rank}"
    names = [dict.fromkeys(name for digests in side for name in digests) for side in (first, second)]
    for name in (*names[0], *names[1]):
        if not all(name in side for side in names):
            return f"{name!r}, which only one of them has"
    return ""


def without_digest(state: Mapping[str, Any]) -> list[str]:
    """Return the names of values that this rank saves without a digest. Nothing tells whether they have changed."""
    return [name for name, value in leaves(state) if not _has_digest(value) and not isinstance(value, RemoteReplica)]


def _has_digest(value: Any) -> bool:
    if isinstance(value, DTensor):
        value = value.to_local()
    if type(value) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return value.layout is torch.strided and not value.is_quantized
    return _is_array(value) or is_plain(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _digest(value: Any) -> str | None:
    if not _has_digest(value):
        return None
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return TENSOR + _of(repr((value.dtype, tuple(value.shape))), bytes_of(value))
    if _is_array(value):
        return VALUE + _of(
            repr((value.dtype.str, value.shape)), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        )
    return VALUE + _of(repr(value), memoryview(b""))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, text, bytes or ``None``, or a list or tuple of such values only."""
    return type(value) in _PLAIN or (type(value) in {list, tuple} and all(map(is_plain, value)))


def _of(kind: str, data: memoryview) -> str:
    pieces = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return checksum(kind.encode(), *pieces).hex()
