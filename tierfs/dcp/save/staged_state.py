"""A staged state dict. Its tensors go to another process in one piece of shared memory.

torch sends the storage of each tensor as a file descriptor of its own, and needs two of them in transfer. For a state
of a few hundred tensors that is more than the limit of open files. For `pickle` and `copy` the state is a dict.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierfs._fork import PerProcess
from tierfs.dcp.save.gpu_tensors import Later
from tierfs.dcp.save.saves import Save, read_here
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.tensorbytes import mark_shards, shards_of
from tierfs.device.detached import detached

ALIGN_BYTES = 64
# Of a tensor: the offset of its bytes, its dtype and its shape.
_Place = tuple[int, torch.dtype, torch.Size]


class StagedState(dict[str, Any]):
    """A staged state dict.

    Args:
        content: Its content.
        later: The staged tensors in the content: contiguous, on the CPU, each with a storage of its own. They may be
            anywhere in it, and be the local parts of DTensors and ShardedTensors. A tensor that is not available yet is
            represented by an `Awaited`, until the content is read.
        file: The shard file that the tensors lie in.
    """

    def __init__(self, content: Mapping[str, Any], later: Later, file: ShardFile) -> None:
        super().__init__(content)
        self._later = later
        self._file = file
        self._lock = PerProcess(threading.Lock)
        self._is_whole = later.ready.is_set()

    def items(self) -> Any:
        """Return the items. DCP calls this first on the state that it saves, on the thread that saves it."""
        self._wait()
        read_here(self._file)
        return super().items()

    def __iter__(self) -> Iterator[str]:
        # Defined so that `dict(...)`, `copy` and `**` call `__getitem__` instead of reading the table directly.
        return super().__iter__()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def get(self, key: str, default: Any = None) -> Any:
        self._wait()
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._wait()
        return super().__getitem__(key)

    def pop(self, *arguments: Any) -> Any:
        self._wait()
        return super().pop(*arguments)

    def popitem(self) -> tuple[str, Any]:
        self._wait()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._wait()
        return super().setdefault(key, default)

    def _wait(self) -> None:
        """Wait for copies from a GPU.

        If one fails, the save fails when it is planned, so that every rank gets the error.
        """
        try:
            with self._lock():
                if not self._is_whole:
                    self._later.result()
                    for key, value in super().items():
                        super().__setitem__(key, _replaced(value))
                    self._is_whole = True
            self._file.wait_filled()
        except Exception as error:
            if self._file.save is None:
                raise
            self._file.save.failure = detached(error)

    def __reduce__(self) -> tuple[Any, ...]:
        self._wait()
        return dict, (dict(self),)

    def _to_a_process(self) -> tuple[Any, ...]:
        """Reduce the state for another process. This is possible once.

        The copy releases the state's room in the ram tier, even if this process keeps the state.
        """
        self._wait()
        self._file.wait_filled()  # a failure would not reach the other process
        read_here(self._file)
        self._file.check_is_held()
        self._file.check_arrived()
        places: dict[int, _Place] = {}
        end = 0
        views = self._later.result()
        for view in views:
            places[id(view)] = end, view.dtype, view.shape
            end += -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        shared = torch.UntypedStorage._new_shared(max(end, 1))
        for view in views:
            _tensor_in(shared, places[id(view)][0], torch.uint8, (view.nbytes,)).copy_(
                view.reshape(-1).view(torch.uint8)
            )
        stream = io.BytesIO()
        _Pickler(stream, places).dump(dict(self))
        self._file.abort()
        return _received, (stream.getvalue(), shared)


class Awaited:
    """Stands for a tensor whose memory is not available yet.

    Args:
        make: Returns the tensor. Called once it is available.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def get(self) -> Any:
        """Return the tensor, the same one each time."""
        if self._made is None:
            self._made = self._make()
        return self._made


def _replaced(value: Any) -> Any:
    """Replace stand-ins by their tensors. Dicts and lists are changed in place."""
    if type(value) is Awaited:
        return value.get()
    if isinstance(value, dict):
        for key, inner in value.items():
            value[key] = _replaced(inner)
    elif type(value) is list:
        value[:] = [_replaced(inner) for inner in value]
    elif type(value) is tuple:
        return tuple(_replaced(inner) for inner in value)
    return value


class UnstagedState(dict[str, Any]):
    """Replaces a state that could not be staged while other ranks wait for this one.

    It is empty, and its save fails with ``error`` when it is planned.
    """

    def __init__(self, save: Save, error: Exception) -> None:
        super().__init__()
        self.save: Save | None = save
        self._failure = save.failure = detached(error)

    def items(self) -> Any:
        """Return the items: see `StagedState.items`."""
        read_here(self)
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        raise self._failure


class _Pickler(ForkingPickler):
    """Pickles the place of each staged tensor, and other values as torch does between processes."""

    def __init__(self, stream: io.BytesIO, places: Mapping[int, _Place]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._places = places

    def persistent_id(self, value: Any) -> Any:
        """Return the place of a staged tensor, and its shards.

        For a DTensor, the place of its local part, and its spec.
        """
        if type(value) is DTensor and id(value._local_tensor) in self._places:
            return self._places[id(value._local_tensor)], value._spec
        if type(value) is torch.Tensor and id(value) in self._places:
            return self._places[id(value)], shards_of(value)
        return None


class _StateUnpickler(pickle.Unpickler):
    """Makes tensors from the places that `_Pickler` wrote."""

    def __init__(self, stream: io.BytesIO, shared: torch.UntypedStorage) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_load(self, said: Any) -> torch.Tensor:
        """Return a tensor that is a view of the shared memory."""
        (at, dtype, shape), spec = said
        view = _tensor_in(self._shared, at, dtype, shape)
        if spec is None or isinstance(spec, dict):
            return mark_shards(view, spec)
        return DTensor(view, spec, requires_grad=False)


def _received(data: bytes, shared: torch.UntypedStorage) -> dict[str, Any]:
    found: dict[str, Any] = _StateUnpickler(io.BytesIO(data), shared).load()
    return found


def _tensor_in(shared: torch.UntypedStorage, at: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared, at, (length,))
    return raw.view(dtype).view(shape)


# `multiprocessing` calls this; other picklers call `__reduce__`.
ForkingPickler.register(StagedState, StagedState._to_a_process)
