"""`Activations`: tensors that autograd saves lie in host memory and on a disk until the backward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tierfs.device.accelerator import accelerator_of
from tierfs.errors import InvalidInputError
from tierfs.experimental.activations.memory import SpillFile
from tierfs.experimental.activations.regions import Region, Regions
from tierfs.host.filesystems import filesystem_of, make_private
from tierfs.host.host import state_directory
from tierfs.units import parse_size

WHOLE_PART = 4
"""A view's whole storage is offloaded if it is at most this many times larger: other views of it need no copy then."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The work so far.

    Attributes:
        saved: Tensors that autograd saved.
        offloaded: Tensors of these that were offloaded.
        offloaded_bytes: Bytes that were offloaded, each once, however many tensors share them.
        kept: Numbers of tensors that were kept where they are, by reason.
        ram_bytes_max: Most bytes that were in host memory at once.
        disk_bytes: Bytes that are on the disk now.
        moved_bytes: Bytes moved by each step: ``drain`` from the GPU, ``write`` and ``read`` of the disk, ``rise`` to
            the GPU.
        waited_s: Seconds that training waited for these.
        failures: Counts of failures, by kind.
    """

    saved: int
    offloaded: int
    offloaded_bytes: int
    kept: dict[str, int]
    ram_bytes_max: int
    disk_bytes: int
    moved_bytes: dict[str, int]
    waited_s: float
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: itself if it is kept, else its region and its shape there."""

    tensor: torch.Tensor | None
    region: Region | None
    guard: torch.Tensor  # empty, with the version counter of the tensor
    version: int
    view: tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # with the offset in the region in bytes


class Activations:
    """A context manager: tensors that autograd saves in it are offloaded, and come back for the backward pass.

    Gradients are bit-equal to those without it. Thread-safe. The backward pass may run outside of the context. Memory
    of the host and space in the file are freed with the graph. One object serves all steps of a run.

    Args:
        ram: Most bytes of host memory, like ``"64GiB"``.
        nvme: Most bytes of the file, 0 for none.
        min_bytes: Smaller tensors are kept where they are.
        directory: A directory on a local disk. By default ``activations`` in the state directory.

    Raises:
        InvalidInputError: A size is no size, or the directory lies in memory.
        StoreError, CapacityError, ReadOnlyError: The directory cannot be used.
    """

    def __init__(
        self,
        ram: str | int,
        nvme: str | int = 0,
        *,
        min_bytes: str | int = "4MiB",
        directory: str | Path | None = None,
    ) -> None:
        self._min_bytes = parse_size(min_bytes)
        file = None
        if parse_size(nvme):
            place = Path(directory) if directory else state_directory() / "activations"
            if filesystem_of(place) in {"tmpfs", "ramfs"}:
                raise InvalidInputError(f"{place} lies in memory: give a directory= on a disk", path=str(place))
            make_private(place)
            file = SpillFile(place, parse_size(nvme))
        self._regions = Regions(parse_size(ram), file)
        self._by_storage: weakref.WeakValueDictionary[Any, Region] = weakref.WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._entered: list[saved_tensors_hooks] = []

    def __enter__(self) -> Activations:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def wrap(self, layers: Iterable[torch.nn.Module]) -> None:
        """Checkpoint layers: keep only their inputs, offloaded, and compute the rest again in the backward pass.

        All tensors among the arguments are offloaded, also those passed by keyword, which `torch.utils.checkpoint`
        keeps where no hook sees them. A layer that is a `CheckpointWrapper` already is checkpointed once.
        """
        for layer in layers:
            inner = getattr(layer, "_checkpoint_wrapped_module", layer)
            layer.forward = _Checkpointed(self, inner.forward if inner is layer else inner)

    def stats(self) -> Stats:
        """Return counts of the work so far."""
        regions = self._regions
        return Stats(
            saved=self._counts["saved"],
            offloaded=self._counts["offloaded"],
            offloaded_bytes=self._counts["bytes"],
            kept=dict(self._kept),
            ram_bytes_max=regions.memory.used_bytes_max,
            disk_bytes=regions.disk_bytes(),
            moved_bytes=dict(regions.moved_bytes),
            waited_s=regions.waited_s,
            failures=dict(regions.failures),
        )

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        self._counts["saved"] += 1
        reason = _why_kept(tensor, self._min_bytes)
        region, view = None, (tensor.dtype, tensor.shape, (), 0)
        if reason is None:
            region, begin = self._region_of(tensor)
            view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset() * tensor.itemsize - begin
            reason = "no room" if region is None else None
        guard = tensor.detach()
        if reason is None:
            self._counts["offloaded"] += 1
            kept, guard.data = None, torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        else:
            self._kept[reason] += 1
            kept = guard
        return _Saved(kept, region, guard, tensor._version, view)

    def _region_of(self, tensor: torch.Tensor) -> tuple[Region | None, int]:
        """Return the region that has a tensor's bytes, new or not, and where in the storage it begins, in bytes."""
        storage = tensor.untyped_storage()
        begin, end = _span(tensor)
        if storage.nbytes() <= WHOLE_PART * (end - begin):
            begin, end = 0, storage.nbytes()
        reference = StorageWeakRef(storage)
        key = reference.cdata, tensor._version, begin, end
        region = self._by_storage.get(key)
        if region is None:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (end - begin,), (1,))
            region = self._regions.hold(source, accelerator_of(tensor))
            if region is not None:
                region.storage = reference
                self._by_storage[key] = region
                self._counts["bytes"] += end - begin
        return region, begin

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.guard._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{saved.view[0]} of shape {list(saved.view[1])} is at version {saved.guard._version}; expected "
                f"version {saved.version} instead"
            )
        if saved.region is None:
            assert saved.tensor is not None
            return saved.tensor
        memory = self._regions.restore(saved.region)
        dtype, shape, stride, at = saved.view
        at = (memory.storage_offset() + at) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), at, shape, stride)


class _Checkpointed:
    """The forward function of a layer, checkpointed."""

    def __init__(self, activations: Activations, forward: Any) -> None:
        self._activations, self._forward = activations, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        tensors = [kwargs.pop(name) for name in names]

        def run(*inputs: Any) -> Any:
            named = dict(zip(names, inputs[len(args) :], strict=True))
            return self._forward(*inputs[: len(args)], **kwargs, **named)

        with self._activations:
            return checkpoint(run, *args, *tensors, use_reentrant=False)


def _why_kept(tensor: torch.Tensor, min_bytes: int) -> str | None:
    """Return why a tensor is not offloaded; None if it is."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout is not torch.strided:
        return "unusual"
    if tensor.numel() * tensor.itemsize < min_bytes:
        return "small"
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
        return "parameter"
    if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return "unusual"
    begin, end = _span(tensor)
    if end - begin > WHOLE_PART * tensor.nbytes:
        return "sparse view"
    accelerator = accelerator_of(tensor)
    if accelerator is None and tensor.device.type != "cpu":
        return "unsupported device"
    return "CUDA graph" if accelerator is not None and accelerator.is_capturing() else None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end in its storage."""
    begin = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize
