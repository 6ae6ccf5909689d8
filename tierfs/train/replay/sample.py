"""`Sample`: a few bytes of each of many tensors, which show that one was changed where no version counts it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierfs.dcp.tensorbytes import bytes_of


class Sample:
    """Samples the bytes of tensors. It keeps the places, because choosing them costs more than a sample."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._turn: int | None = None
        self._bytes: list[tuple[int, torch.device, Any]] = []
        self._places: dict[torch.device, list[tuple[int, Any]]] = {}

    def of(self, tensors: Sequence[torch.Tensor], turn: int) -> list[bytes]:
        """Return 64 bytes of each tensor, and of each 128 KiB of a large one. ``turn`` chooses the places.

        Where that is more than 256 places in all, they are farther apart.
        """
        if (at := list(map(torch.Tensor.data_ptr, tensors))) != self._at:
            self._at, self._turn = at, None
            self._bytes = [(place, each.device, _bytes_in(each)) for place, each in enumerate(tensors) if each.numel()]
        if turn != self._turn:
            self._turn, self._places = turn, {}
            stride = max(128 << 10, sum(len(data) for *_, data in self._bytes) // 256)
            for place, device, data in self._bytes:
                begins = range(turn * 64 * 37 % min(stride, len(data)), len(data), stride)
                self._places.setdefault(device, []).extend((place, data[begin : begin + 64]) for begin in begins)
        found = [b""] * len(tensors)
        for device, places in self._places.items():
            read: Any = [data for _, data in places]
            if device.type != "cpu":
                whole, end = bytes_of(torch.cat(read)), 0
                read = [whole[(end := end + len(data)) - len(data) : end] for data in read]
            for (place, _), data in zip(places, read, strict=True):
                found[place] += data
        return found


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counts the changes in place: of a DTensor, that of this rank's part."""
    return tensor._local_tensor if type(tensor) is DTensor else tensor


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(attrgetter("_version"), tensors))


def _bytes_in(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes, to be sliced: its own memory, or only that of its first element if it has gaps."""
    tensor = tensor.detach()
    own = tensor.view(-1) if tensor.is_contiguous() else tensor[(slice(1),) * tensor.dim()].view(-1)
    return bytes_of(own) if own.device.type == "cpu" else own.view(torch.uint8)
