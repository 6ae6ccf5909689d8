"""The values of a state: their names, their digests, and values that are not tensors as text.

Digests compare a saved state with a live one, or two saves. Equal values give equal text, and reading text runs no code
from a checkpoint.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch.distributed.tensor import DTensor

from tierfs.dcp.objects import check_object
from tierfs.dcp.planner import unpickle_safely
from tierfs.dcp.save.replicas import RemoteReplica
from tierfs.dcp.tensorbytes import bytes_of
from tierfs.digest import CHUNK_BYTES, Buffer, checksum
from tierfs.errors import FormatError, InvalidInputError, TierfsError

TENSOR, VALUE = "t", "v"
"""The first letter of a digest: of a tensor, or of another value."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf of a nested state. DCP's planners build the same names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and _has_leaves(value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def _has_leaves(value: Any) -> bool:
    """Return whether the planners divide a value: a mapping, or a list that holds one or a tensor, but no tuple."""
    return isinstance(value, (Mapping, torch.Tensor)) or (isinstance(value, list) and any(map(_has_leaves, value)))


def digests_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each value that this rank has, by name; for a sharded tensor, that of its local shard.

    Values that another rank saves, and values of types without a digest, are left out.
    """
    found = {}
    for name, value in leaves(state):
        digest = digest_of(value)
        if digest is not None:
            found[name] = digest
    return found


def first_difference(first: Sequence[Mapping[str, str]], second: Sequence[Mapping[str, str]]) -> str:
    """Describe the first value in which two states differ; empty if they are the same.

    Each is given by the digests of each rank by name. A rank may lack the digest of a value that another rank saves.
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
    return [name for name, value in leaves(state) if not has_digest(value) and not isinstance(value, RemoteReplica)]


def has_digest(value: Any) -> bool:
    """Return whether `digests_of` has a digest for a value."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if type(value) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return value.layout is torch.strided and not value.is_quantized
    return _is_array(value) or is_plain(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def digest_of(value: Any) -> str | None:
    """Return the digest of a leaf; for a sharded tensor, that of its local shard; ``None`` for a type without one."""
    if not has_digest(value):
        return None
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return TENSOR + _of(repr((value.dtype, tuple(value.shape))), bytes_of(value))
    if _is_array(value):
        return VALUE + _of(
            repr((value.dtype.str, value.shape)), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        )
    return VALUE + _of(pack(value) if type(value) is set else repr(value), memoryview(b""))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, text, bytes or ``None``, or a list, tuple or set of such values only.

    A frozenset is none: `TierLoadPlanner` does not load it by default.
    """
    return type(value) in _PLAIN or (type(value) in {list, tuple, set} and all(map(is_plain, value)))


def _of(kind: str, data: memoryview) -> str:
    pieces = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return checksum(kind.encode(), *pieces).hex()


_HINT = "if you trust its source, import {modules}, and call torch.serialization.add_safe_globals([{name}]) first"
_AS_THEY_ARE = (bool, int, float, str, type(None))


def pack(value: Any) -> str:
    """Encode a value as JSON.

    Plain values, lists, tuples, sets, dicts, bytes, CPU tensors and NumPy arrays come back exactly, and so does a Counter.
    Any other subclass of dict comes back as a dict. Any other value is pickled by ``torch.save``.

    Raises:
        InvalidInputError: NumPy cannot describe the dtype of an array: another package defines it, or its fields
            overlap. Or a restore of this program would not load a value.
    """
    return json.dumps(_encode(value), separators=(",", ":"))


def unpack(text: str, where: str) -> Any:
    """Decode a value that `pack` encoded.

    Errors begin with ``where``.

    Raises:
        FormatError: The text is invalid, or from a newer version.
        InvalidInputError: A pickle in it refers to something that a checkpoint may not load.
    """
    try:
        return _decode(json.loads(text), where)
    except TierfsError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{where} cannot be read: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_encode(inner) for inner in value]
    if kind is tuple:
        return {"tuple": [_encode(inner) for inner in value]}
    if kind in {set, frozenset}:
        # A set has no order, but equal sets must give equal text.
        return {kind.__name__: sorted((_encode(inner) for inner in value), key=json.dumps)}
    if kind is Counter:
        return {"counter": [[_encode(key), _encode(inner)] for key, inner in value.items()]}
    if isinstance(value, dict):  # subclasses, too: an object that loads one accepts a dict
        return {"dict": [[_encode(key), _encode(inner)] for key, inner in value.items()]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(bytes_of(value))]}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        name = "array" if isinstance(value, np.ndarray) else "number"
        return {name: [_encode(_described(value.dtype)), list(value.shape), _text(value.tobytes())]}
    return {"pickle": _text(_pickled(kind.__name__, value))}


def check_values(values: Mapping[str, Any]) -> None:
    """Check that a restore of this program would load every object in a nested state. Tensors are not checked.

    Raises:
        InvalidInputError: It would not load one. The message names it.
    """
    for name, value in leaves(values):
        if not isinstance(value, torch.Tensor) and not is_plain(value):
            _pickled(name, value)


def _pickled(name: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    check_object(name, buffer.getbuffer(), is_strict=True)
    return buffer.getvalue()


def _described(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as NumPy's own files describe it: text, or a list of fields.

    Raises:
        InvalidInputError: The dtype cannot be described so, for example because another package defines it.
    """
    try:
        described = dtype_to_descr(dtype)
        if descr_to_dtype(described) == dtype:
            return described
    except ValueError:  # for example, fields that overlap
        pass
    raise InvalidInputError(f"an array of dtype {dtype!r} cannot be saved exactly: save it as a plain dtype")


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(inner, where) for inner in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in {"dict", "counter"}:
        pairs = {_decode(key, where): _decode(inner, where) for key, inner in content}
        return pairs if kind == "dict" else Counter(pairs)
    if kind in {"tuple", "set", "frozenset"}:
        make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(_decode(inner, where) for inner in content)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "tensor":
        return _tensor(*content)
    if kind in {"array", "number"}:
        described, shape, text = content
        dtype = descr_to_dtype(_decode(described, where))
        array = np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "pickle":
        return unpickle_safely(where, io.BytesIO(base64.b64decode(content, validate=True)), hint=_HINT)
    raise FormatError(f"{where} has a {kind!r}, which this version does not know")


def _tensor(name: str, shape: list[int], text: str) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"torch has no dtype {name!r}")
    raw = bytearray(base64.b64decode(text, validate=True))
    found = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return found.view(dtype).reshape(shape)


def _text(data: Buffer) -> str:
    return base64.b64encode(data).decode("ascii")
