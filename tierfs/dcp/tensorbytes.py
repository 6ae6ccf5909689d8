"""Convert a tensor to its stored bytes and back, without a copy wherever its memory allows that.

The bytes are those of the elements in row-major order and in this machine's byte order, which is little-endian
everywhere torch runs checkpoints.

A tensor that cannot be copied has a stand-in: planning it fails, so every rank gets the error. A plain tensor may
describe the shards of a larger tensor that it holds: torch's ``CheckpointableTensor`` (2.14). torch plans such a tensor
by four of its attributes, so a copy needs them too. An older torch ignores them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from tierfs.device.accelerator import as_bytes
from tierfs.digest import Buffer
from tierfs.errors import InvalidInputError

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes of tensors that hold no more than a plain tensor."""
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
"""Names of dtypes in the safetensors format, for shard files. A tensor of any other dtype is stored as ``U8``."""
_EXCHANGED = {**SAFETENSORS_NAMES, torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"}
_BY_NAME = {name: dtype for dtype, name in _EXCHANGED.items()}
_F4 = "F4"
_F4_IN_ONE = 2
"""The number of ``F4`` elements in one element of torch's ``float4_e2m1fn_x2``, along the last dimension."""
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def in_safetensors(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and shape that the safetensors library gives a tensor; ``None`` if the format has none."""
    if dtype is torch.float4_e2m1fn_x2:
        return (_F4, (*shape[:-1], _F4_IN_ONE * shape[-1])) if shape else None
    name = _EXCHANGED.get(dtype)
    return None if name is None else (name, tuple(shape))


def in_torch(name: str, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the inverse of `in_safetensors`; ``None`` if torch has no such tensor."""
    if name == _F4:
        if not shape or shape[-1] % _F4_IN_ONE:
            return None
        return torch.float4_e2m1fn_x2, (*shape[:-1], shape[-1] // _F4_IN_ONE)
    dtype = _BY_NAME.get(name)
    return None if dtype is None else (dtype, tuple(shape))


@functools.cache
def has_size_in_plans(dtype: torch.dtype) -> bool:
    """Return whether torch's planners know the size of a dtype. They do not for ``uint4`` or ``bits8``."""
    try:
        torch._utils._element_size(dtype)
    except TypeError:
        return False
    return True


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor has a quantized dtype.

    A view of other elements as such a dtype has one, although its ``is_quantized`` is false.
    """
    return tensor.dtype in _QUANTIZED


def lacks_quantizer(tensor: Any) -> bool:
    """Return whether a tensor has a quantized dtype and no quantizer. The process dies if torch copies such a view."""
    if not is_quantized(tensor):
        return False
    try:
        return not tensor.is_quantized or tensor.qscheme() is None
    except RuntimeError:  # a copy of such a view has ``is_quantized`` set, but no quantizer either
        return True


def bytes_of(tensor: Any) -> memoryview:
    """Return the bytes of a tensor's elements: its own memory if it is contiguous on the CPU, else the smallest copy.

    Args:
        tensor: A dense tensor of any dtype but a quantized one, on any device but ``meta``, with any strides.

    Returns:
        A flat view of bytes that keeps the memory alive. It changes with the tensor unless it is a copy.

    Raises:
        InvalidInputError: The tensor has no elements in memory of its own, or consists of more than its elements.
    """
    refuse_unusual(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        # torch cannot copy some of the one-byte dtypes, but it can copy their bytes.
        plain = plain.view(torch.uint8)
    return memoryview(as_bytes(plain.cpu().contiguous()).numpy())


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a view of the part of a tensor at ``offsets`` with ``lengths``. A whole dimension is not narrowed."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if offset or length != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, length)
    return tensor


def writable_bytes(tensor: Any) -> memoryview | None:
    """Return a tensor's own memory for writing its elements' bytes; ``None`` if they are not contiguous on the CPU.

    The rule of `plain_bytes` about autograd holds.
    """
    flat = plain_bytes(tensor) if tensor.device.type == "cpu" else None
    return None if flat is None else memoryview(flat.numpy())


def plain_bytes(tensor: Any) -> torch.Tensor | None:
    """Return a tensor's own memory, uint8 of one dimension; ``None`` unless it is the elements' bytes, contiguous.

    Args:
        tensor: On any device. torch does not see writes to its memory, so the caller has to call
            `torch.autograd.graph.increment_version` for autograd.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout != torch.strided or is_quantized(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return as_bytes(tensor) if tensor.is_contiguous() else None


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Return whether elements of a strided tensor share memory, as in an expanded one, so that it cannot be loaded."""
    return bool(tensor.numel()) and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def tensor_in(buffer: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """Return a tensor that lies in ``buffer`` and keeps it alive. Its address is the buffer's, aligned or not.

    Raises:
        InvalidInputError: The buffer is read-only, or not exactly as long as the tensor's bytes.
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


def lies_nowhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor with elements has a storage without memory. Its offset in the storage may hide that."""
    return bool(tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize)


def refuse_unusual(tensor: Any, name: str = "") -> None:
    """Check that a tensor can be stored: it has elements in memory, and consists of nothing else.

    Raises:
        InvalidInputError: The tensor cannot be stored. The message says what to store instead.
    """
    problem = problem_of(tensor)
    if problem:
        what = "a tensor" if _is_shapeless(tensor) else f"a tensor of shape {list(tensor.shape)}"
        raise InvalidInputError(f"{f'{name!r}, {what},' if name else what} cannot be stored as bytes: {problem}")


def problem_of(tensor: Any) -> str:
    """Return why a tensor cannot be stored, and what to store instead; empty if it can."""
    if is_lazy(tensor):
        return "it is not initialized: call its module with a batch first"
    if tensor.is_nested:
        return "it is nested: store the tensors that unbind() gives"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__} consists of other tensors: pass those (to_local() of a DTensor, for example)"
    if isinstance(tensor, FakeTensor):
        return "it is a FakeTensor, which has no content: make it outside of FakeTensorMode"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: make it dense with to_dense()"
    if lacks_quantizer(tensor):
        return f"it is a view with dtype {tensor.dtype}, which torch cannot copy: store the integer tensor behind it"
    if tensor.is_quantized:
        return f"{tensor.dtype} is quantized: store int_repr(), scale and zero point"
    if tensor.is_meta:
        return "it is on the meta device, where tensors have no content: materialize it with to_empty() and load it"
    if _has_no_memory(tensor):
        return "its memory was freed (a currently sharded parameter, for example): pass the tensor that has the content"
    return ""


def has_no_copy(tensor: Any) -> bool:
    """Return whether a copy would have other content, or content that no plan can be made from."""
    return _is_shapeless(tensor) or _has_no_memory(tensor)


def _is_shapeless(tensor: Any) -> bool:
    return is_lazy(tensor) or bool(tensor.is_nested)


def _has_no_memory(tensor: Any) -> bool:
    """Return whether a tensor's memory was freed. Reading its elements would then read arbitrary memory."""
    return bool(tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes())


class Refused(torch.Tensor):  # type: ignore[misc]  # torch's classes are untyped here
    """A tensor without elements that is never saved.

    Attributes:
        why: Names the original tensor, and says what to store instead. torch's copies of this tensor have the default.
    """

    why = "a tensor that cannot be copied"

    def __create_write_items__(self, _fqn: str, _object: Any) -> NoReturn:
        """Raise, by DCP's protocol for tensors that create their own items."""
        raise InvalidInputError(self.why)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Raise: inside the bytes of an object, the missing tensor would go unnoticed."""
        raise InvalidInputError(self.why)


def refused(why: str) -> Refused:
    """Return a stand-in. It may be sent to the process that saves."""
    made: Refused = torch.Tensor._make_subclass(Refused, torch.empty(0))
    made.why = why
    return made


def _reduce(stand_in: Refused) -> tuple[Any, ...]:
    return refused, (stand_in.why,)


ForkingPickler.register(Refused, _reduce)


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


def _all_of(kind: type) -> dict[str, Any]:
    # An alias (torch.half) is the same object as the original, and its text is the original's name (torch.float16).
    found = [value for value in vars(torch).values() if isinstance(value, kind)]
    return {str(value).removeprefix("torch."): value for value in found}


DTYPES: Mapping[str, torch.dtype] = _all_of(torch.dtype)
LAYOUTS: Mapping[str, torch.layout] = _all_of(torch.layout)
MEMORY_FORMATS: Mapping[str, torch.memory_format] = _all_of(torch.memory_format)


def name_of(names: Mapping[str, Any], value: Any, fqn: str) -> str:
    """Return the name of ``value`` in documents.

    Raises:
        InvalidInputError: ``value`` has no name.
    """
    name = str(value).removeprefix("torch.")
    if names.get(name) is not value:
        raise InvalidInputError(f"{fqn}: {value!r} cannot be stored: it has no name in a checkpoint")
    return name
