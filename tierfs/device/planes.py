"""Byte planes of blocks in device memory, as the codecs PLANE and DPLANE make them before they compress each plane.

This module launches `kernels/planes.cu`. Its numpy references run the codec's own functions. The caller makes the
heads, the modes and the frames of the planes. FORMAT.md, "Codecs".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierfs.codec.delta.differences import decode_difference, difference
from tierfs.codec.planes.packing import Mode, PlaneFit
from tierfs.codec.planes.planes import (
    PLANE_HEAD_BYTES,
    WIDTHS,
    PlaneOrder,
    PlaneWriter,
    decode_plane,
    put_planes_by_numpy,
)
from tierfs.codec.planes.zigzag import zigzag
from tierfs.codec.scratch import elements_of
from tierfs.device.kernel_launch import function, launch
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.errors import InvalidInputError

THREADS = 256
# Bytes of one turn of a CUDA block. Each of its threads has 64 bytes in flight.
_PART_BYTES = THREADS * 64
# struct Row of planes.cu.
_ROW = np.dtype(
    [
        ("raw", "<u8"),
        ("base", "<u8"),
        ("planes", "<u8"),
        ("length", "<u4"),
        ("width", "u1"),
        ("order", "u1"),
        ("zeros", "u1", 2),
    ]
)


@dataclass(frozen=True, slots=True)
class PlaneBlock:
    """One block and its planes. The tensors are uint8, contiguous, of one dimension, borrowed, and must not overlap.

    The tensors may begin at any address. Speed is best if ``raw``, ``base`` and ``planes`` begin at multiples of 16
    bytes, and the length of the block is a multiple of 16 bytes.

    Args:
        raw: The block, at most 1 MiB. Bytes behind its last whole element are neither read nor written.
        planes: E x ``width`` bytes for E whole elements: the planes one after the other, most significant bytes first.
        width: Bytes of an element: 1, 2, 4 or 8.
        order: The order in the head of the encoded block. AS_IT_IS, or for elements of at least 2 bytes SIGN_LAST
            without a base (PLANE) and ZIGZAG with a base (DPLANE).
        base: The base, of the same length as ``raw``. With a base, the planes hold zigzagged differences to it.

    Raises:
        InvalidInputError: A size, dtype or device is wrong, or the format does not have the order.
    """

    raw: torch.Tensor
    planes: torch.Tensor
    width: int
    order: PlaneOrder = PlaneOrder.AS_IT_IS
    base: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check(self.width, self.order, has_base=self.base is not None)
        length = self.raw.numel()
        if length > BLOCK_BYTES:
            raise InvalidInputError(f"a block has {length} bytes, but at most {BLOCK_BYTES} are allowed")
        wanted = [("raw", self.raw, length), ("planes", self.planes, length // self.width * self.width)]
        if self.base is not None:
            wanted.append(("base", self.base, length))
        for name, tensor, size in wanted:
            is_bytes = tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
            if not is_bytes or tensor.numel() != size or tensor.device != self.raw.device:
                raise InvalidInputError(
                    f"{name} must be {size} contiguous bytes (uint8) on {self.raw.device}, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
                )


def split_planes(blocks: Sequence[PlaneBlock]) -> None:
    """Fill in the planes of blocks, by one launch on torch's current stream of their device.

    Returns as soon as the launch is queued. Each byte of a block and of its base is read once. Each byte of its planes
    is written once.

    Args:
        blocks: Blocks on one CUDA device. Widths and orders may differ.

    Raises:
        InvalidInputError: The blocks are not on one CUDA device, or CuPy is not installed.
        StoreError: The GPU's compiler rejects the kernel.
    """
    _launch("split_planes", blocks)


def join_planes(blocks: Sequence[PlaneBlock]) -> None:
    """Fill in the elements of blocks from their planes and bases, by one launch.

    This is the inverse of `split_planes`, with the same conditions.
    """
    _launch("join_planes", blocks)


def table_of(blocks: Sequence[PlaneBlock]) -> NDArray[Any]:
    """Return the table for the kernels: one row of 32 bytes per block. It holds addresses and keeps no tensor alive."""
    return np.array(
        [
            (
                block.raw.data_ptr(),
                0 if block.base is None else block.base.data_ptr(),
                block.planes.data_ptr(),
                block.raw.numel(),
                block.width,
                int(block.order),
                (0, 0),
            )
            for block in blocks
        ],
        _ROW,
    )


def parts_of(blocks: Sequence[PlaneBlock]) -> int:
    """Return the number of CUDA blocks of `THREADS` threads per block: as many as the longest block keeps busy."""
    longest: int = max(block.raw.numel() for block in blocks)
    return max(1, -(-longest // _PART_BYTES))


def split_planes_reference(raw: Buffer, width: int, order: PlaneOrder, base: Buffer | None = None) -> bytes:
    """Return the planes that the codec compresses, as its own functions make them. The arguments are `PlaneBlock`'s.

    Raises:
        InvalidInputError: The format does not have the order, or the base has another length.
    """
    _check(width, order, has_base=base is not None)
    view = memoryview(raw)
    elements = elements_of(view, width)
    if base is not None:
        if len(base) != len(raw):
            raise InvalidInputError(f"the base has {len(base)} bytes, but the block has {len(raw)}")
        elements = difference(view, width, memoryview(base))
        if order is PlaneOrder.AS_IT_IS:
            zigzag(elements)
    if not elements.size:
        return b""
    writer = _RawPlanes(view, width)
    put_planes_by_numpy(writer, elements, [PlaneFit(Mode.RAW)] * width, order)
    return writer.joined()


def join_planes_reference(
    planes: Buffer, width: int, order: PlaneOrder, base: Buffer | None = None, tail: Buffer = b""
) -> bytes:
    """Return the block that the codec decodes from uncompressed planes.

    Args:
        planes: E x ``width`` bytes.
        width: Bytes of an element.
        order: The order of the bits. See `PlaneBlock`.
        base: The base, of the same length as the block, if any.
        tail: The bytes of the block behind its last whole element.

    Raises:
        InvalidInputError: The format does not have the order.
    """
    _check(width, order, has_base=base is not None)
    head = struct.pack("<BB", width, order) + struct.pack("<BI", Mode.RAW, len(planes) // width) * width
    encoded = memoryview(b"".join((head, planes, tail)))
    out = bytearray(len(planes) + len(tail))
    if base is None:
        decode_plane(encoded, memoryview(out))
    else:
        decode_difference(encoded, memoryview(out), memoryview(base))
    return bytes(out)


class _RawPlanes(PlaneWriter):
    """Collects the planes that the codec makes, without compressing them."""

    def __init__(self, raw: memoryview, width: int) -> None:
        super().__init__(raw, width, memoryview(b""), -width * PLANE_HEAD_BYTES, width)
        self.fits = True
        self._kept: list[tuple[Mode, bytearray]] = []

    def place(self, mode: Mode, length: int) -> memoryview | None:
        kept = bytearray(length)
        self._kept.append((mode, kept))
        return memoryview(kept)

    def joined(self) -> bytes:
        """Return the planes one after the other. Two planes that the codec leaves interleaved are separated."""
        return b"".join(kept[1::2] + kept[::2] if mode is Mode.WOVEN else kept for mode, kept in self._kept)


def _check(width: int, order: PlaneOrder, *, has_base: bool) -> None:
    if width not in WIDTHS:
        raise InvalidInputError(f"elements cannot have {width} bytes: choose one of {WIDTHS}")
    upper = PlaneOrder.ZIGZAG if has_base else PlaneOrder.SIGN_LAST
    if order != PlaneOrder.AS_IT_IS and (order != upper or width == 1):
        raise InvalidInputError(
            f"the format has no order {PlaneOrder(order).name} for elements of {width} bytes {'with' if has_base else 'without'} a base"
        )


def _launch(name: str, blocks: Sequence[PlaneBlock]) -> None:
    if not blocks:
        return
    devices = {block.raw.device for block in blocks}
    device = blocks[0].raw.device
    if len(devices) != 1 or device.type != "cuda":
        raise InvalidInputError(f"blocks on {sorted(map(str, devices))}: they must be on one CUDA device")
    with torch.cuda.device(device):
        kernel = function(name, "planes")
        # A copy from pinned memory does not wait for the stream. torch keeps both tables until the stream has used
        # them.
        table = torch.from_numpy(table_of(blocks).view(np.uint8)).pin_memory().to(device, non_blocking=True)
        parts = parts_of(blocks)
        launch(kernel, len(blocks) * parts, THREADS, (table, np.uint32(parts)), device=device)
