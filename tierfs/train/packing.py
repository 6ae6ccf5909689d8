"""Plain values as text and back: equal values give equal text, and reading runs nothing that a checkpoint brings along."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from tierfs.dcp.planner import unpickle_safely
from tierfs.dcp.tensorbytes import bytes_of
from tierfs.digest import Buffer
from tierfs.errors import FormatError, InvalidInputError, TierfsError

__all__ = ["pack", "unpack"]

_AS_THEY_ARE = (bool, int, float, str, type(None))


def pack(value: Any) -> str:
    """A value as JSON: plain values, lists, tuples, sets, dicts, bytes, CPU tensors and arrays exactly, anything else pickled by torch.

    Raises:
        InvalidInputError: An array has a dtype that only its package knows, or whose fields overlap.
    """
    return json.dumps(_encode(value), separators=(",", ":"))


def unpack(text: str, where: str) -> Any:
    """The value again.

    Args:
        text: What `pack` gave.
        where: How to name it in errors.

    Raises:
        FormatError: It is none.
        InvalidInputError: It has something in it that a checkpoint may not bring in.
    """
    try:
        return _decode(json.loads(text), where)
    except TierfsError:
        raise
    except (ValueError, KeyError, TypeError) as error:
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
        # A set has no order, and equal ones have to give equal text.
        return {kind.__name__: sorted((_encode(inner) for inner in value), key=json.dumps)}
    if isinstance(value, dict):  # subclasses as well: what loads one takes a dict
        return {"dict": [[_encode(key), _encode(inner)] for key, inner in value.items()]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(bytes_of(value))]}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        name = "array" if isinstance(value, np.ndarray) else "number"
        return {name: [_encode(_described(value.dtype)), list(value.shape), _text(value.tobytes())]}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return {"pickle": _text(buffer.getvalue())}


def _described(dtype: np.dtype[Any]) -> Any:
    """A dtype as numpy's own files name it: text, or a list of fields.

    Raises:
        InvalidInputError: It cannot be named so, as that of another package cannot.
    """
    try:
        described = dtype_to_descr(dtype)
        if descr_to_dtype(described) == dtype:
            return described
    except ValueError:  # fields that overlap, for one
        pass
    raise InvalidInputError(f"an array of dtype {dtype!r} cannot be saved exactly: save it as a plain dtype")


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(inner, where) for inner in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_decode(key, where): _decode(inner, where) for key, inner in content}
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
        return unpickle_safely(where, io.BytesIO(base64.b64decode(content, validate=True)))
    raise FormatError(f"{where} has a {kind!r}, which this version does not know")


def _tensor(name: str, shape: list[int], text: str) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"there is no dtype {name!r}")
    raw = bytearray(base64.b64decode(text, validate=True))
    found = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return found.view(dtype).reshape(shape)


def _text(data: Buffer) -> str:
    return base64.b64encode(data).decode("ascii")
