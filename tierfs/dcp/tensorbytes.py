"""A tensor as the bytes that are stored of it, and back, without a copy wherever memory allows it.

The bytes are those of the elements in row-major order, in the order of this machine, which is little-endian everywhere
torch runs checkpoints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from tierfs.digest import Buffer
from tierfs.errors import InvalidInputError

__all__ = [
    "PLAIN_TYPES",
    "SAFETENSORS_NAMES",
    "bytes_of",
    "has_no_copy",
    "has_size_in_plans",
    "in_safetensors",
    "in_torch",
    "is_quantized",
    "lacks_quantizer",
    "lies_nowhere",
    "narrowed",
    "problem_of",
    "refuse_unusual",
    "tensor_in",
    "writable_bytes",
]

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes of tensors that add nothing to them."""
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The safetensors format's names of dtypes, in shard files. A tensor of any other is stored as ``U8`` there."""
_EXCHANGED = {**SAFETENSORS_NAMES, torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"}
_BY_NAME = {name: dtype for dtype, name in _EXCHANGED.items()}
_F4 = "F4"
_F4_IN_ONE = 2
"""Elements of the format's ``F4`` that one of torch's ``float4_e2m1fn_x2`` holds, along the last dimension."""
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def in_safetensors(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape that the safetensors library gives a tensor; ``None`` where the format has none."""
    if dtype is torch.float4_e2m1fn_x2:
        return (_F4, (*shape[:-1], _F4_IN_ONE * shape[-1])) if shape else None
    name = _EXCHANGED.get(dtype)
    return None if name is None else (name, tuple(shape))


def in_torch(name: str, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """The reverse of `in_safetensors`; ``None`` where torch has no such tensor."""
    if name == _F4:
        if not shape or shape[-1] % _F4_IN_ONE:
            return None
        return torch.float4_e2m1fn_x2, (*shape[:-1], shape[-1] // _F4_IN_ONE)
    dtype = _BY_NAME.get(name)
    return None if dtype is None else (dtype, tuple(shape))


@functools.cache
def has_size_in_plans(dtype: torch.dtype) -> bool:
    """Whether torch's planners can weigh a tensor: they do not know how long a ``uint4`` or a ``bits8`` is."""
    try:
        torch._utils._element_size(dtype)
    except TypeError:
        return False
    return True


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor has a quantized dtype; a view of other elements as such a dtype has, and says of itself that it is not quantized."""
    return tensor.dtype in _QUANTIZED


def lacks_quantizer(tensor: Any) -> bool:
    """Whether it has a quantized dtype and no quantizer: torch ends the process where it copies such a view."""
    if not is_quantized(tensor):
        return False
    try:
        return not tensor.is_quantized or tensor.qscheme() is None
    except RuntimeError:  # a copy of such a view says that it is quantized, and has none either
        return True


def bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor's elements: its own memory where it is contiguous on the CPU, else the smallest copy.

    Args:
        tensor: Any dense tensor: any dtype but a quantized one, any device but ``meta``, any strides.

    Returns:
        A flat view of bytes that keeps the memory alive. It changes with the tensor unless it had to be copied.

    Raises:
        InvalidInputError: The tensor has no elements in memory of its own, or they are not all there is to it.
    """
    refuse_unusual(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        # torch does not know how to copy some of the small ones; their bytes it does.
        plain = plain.view(torch.uint8)
    return _flat(plain.cpu().contiguous())


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The part of a tensor at these offsets, with these lengths, as a view; along a whole dimension nothing is asked of the tensor."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if offset or length != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, length)
    return tensor


def writable_bytes(tensor: Any) -> memoryview | None:
    """A tensor's own memory, to be filled with the bytes of its elements; ``None`` if they do not lie there in order.

    Args:
        tensor: Where to write. A write that torch does not see calls `torch.autograd.graph.increment_version` for autograd.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout != torch.strided or is_quantized(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return _flat(tensor.detach()) if tensor.is_contiguous() else None


def tensor_in(buffer: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """A tensor that lies in ``buffer``, which it keeps alive. Its address is the buffer's, aligned or not.

    Args:
        buffer: Writable, exactly as long as the tensor's bytes.
        dtype: The elements'.
        shape: The tensor's.

    Raises:
        InvalidInputError: The buffer is read-only, or of another length.
    """
    view = memoryview(buffer)
    wanted = math.prod(shape) * dtype.itemsize
    if view.nbytes != wanted:
        raise InvalidInputError(f"a tensor of {dtype} and shape {list(shape)} takes {wanted} bytes, not {view.nbytes}")
    if view.readonly:
        raise InvalidInputError("a tensor's memory has to be writable: give a bytearray, not bytes")
    if not wanted:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _flat(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def lies_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has a storage without memory. Where it begins within that may hide it."""
    return bool(tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize)


def refuse_unusual(tensor: Any, name: str = "") -> None:
    """See that a tensor is what can be stored: elements in memory, and nothing else to it.

    Args:
        tensor: On any device.
        name: To be said in the error.

    Raises:
        InvalidInputError: It is not; says what to store in its place.
    """
    problem = problem_of(tensor)
    if problem:
        what = "a tensor" if _is_shapeless(tensor) else f"a tensor of shape {list(tensor.shape)}"
        raise InvalidInputError(f"{f'{name!r}, {what},' if name else what} cannot be stored as bytes: {problem}")


def problem_of(tensor: Any) -> str:
    """Why a tensor is not what can be stored, and what to store in its place; empty if it is."""
    if is_lazy(tensor):
        return "it is not initialized: call its module with a batch first"
    if tensor.is_nested:
        return "it is nested: store the tensors that unbind() gives"
    if hasattr(tensor, "__tensor_flatten__"):
        return (
            f"a {type(tensor).__name__} is made of other tensors: give those, a DTensor's to_local() for example, or save it "
            "as it is by dcp.save with layout='dcp'"
        )
    if isinstance(tensor, FakeTensor):
        return "it is a FakeTensor, which has no content: make it outside of FakeTensorMode"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: make it dense with to_dense()"
    if lacks_quantizer(tensor):
        return f"it is a view as {tensor.dtype}, which torch cannot copy: store it as the integers that it is a view of"
    if tensor.is_quantized:
        return f"{tensor.dtype} has more to it than its elements: store int_repr(), scale and zero point"
    if tensor.is_meta:
        return "it is on the meta device, where tensors have no content: materialize it with to_empty() and load it"
    if _has_no_memory(tensor):
        return (
            "its memory was freed (a parameter that is sharded at the moment, for example): give what holds its content"
        )
    return ""


def has_no_copy(tensor: Any) -> bool:
    """Whether a copy would have another content, or none that a plan can be made of."""
    return _is_shapeless(tensor) or _has_no_memory(tensor)


def _is_shapeless(tensor: Any) -> bool:
    return is_lazy(tensor) or bool(tensor.is_nested)


def _has_no_memory(tensor: Any) -> bool:
    """Whether a tensor's memory was freed. To look at its elements would be to look anywhere."""
    return bool(tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes())
