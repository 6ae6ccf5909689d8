"""`Activations`: tensors that autograd saves lie in host memory and on a disk until the backward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tierfs.device.accelerator import accelerator_of
from tierfs.errors import InvalidInputError
from tierfs.experimental.activations.choice import KeepChoice
from tierfs.experimental.activations.memory import Space, SpillFile
from tierfs.experimental.activations.regions import Region, Regions
from tierfs.host.filesystems import filesystem_of, make_private
from tierfs.host.host import state_directory
from tierfs.units import parse_size

WHOLE_PART = 4
"""A view's whole storage is offloaded if it is at most this many times larger: other views of it need no copy then."""


class _Saved(NamedTuple):
    """A saved tensor: its region and its place there, or the tensor itself."""

    region: Region | None
    at: int  # in the region, in bytes
    like: torch.Tensor  # on the meta device, unless it is the tensor itself
    guard: torch.Tensor  # has the version counter of the tensor
    version: int


class Activations(saved_tensors_hooks):  # type: ignore[misc]  # torch's classes are untyped here
    """A context manager: tensors that autograd saves in it are offloaded, and come back for the backward pass.

    Gradients are equal bit for bit to those without it. The backward pass may run outside of the context. Memory and
    disk are freed with the graph. One object serves all steps of a run, and threads may share it.

    Args:
        ram: Most bytes of host memory, like ``"64GiB"``.
        nvme: Most bytes of a file on a local disk; 0 for none.
        min_bytes: Smaller tensors are kept where they are.
        keep: ``"none"`` offloads every tensor, however long that takes. ``"auto"`` measures three steps, then keeps the
            tensors that could not come back in time.
        directory: Where the file lies. By default ``activations`` in the state directory.

    Raises:
        InvalidInputError: An argument is none of these, or the directory lies in memory.
        StoreError, CapacityError, ReadOnlyError: The directory cannot be used.
    """

    def __init__(
        self,
        ram: str | int,
        nvme: str | int = 0,
        *,
        min_bytes: str | int = "4MiB",
        keep: Literal["auto", "none"] = "none",
        directory: str | Path | None = None,
    ) -> None:
        if keep not in {"auto", "none"}:
            raise InvalidInputError(f"keep={keep!r}: must be 'auto' or 'none'")
        if parse_size(ram) < max(parse_size(min_bytes), 1):
            raise InvalidInputError(f"ram={ram!r} has no room for a tensor of min_bytes={min_bytes!r}: give more")
        place = Path(directory) if directory else state_directory() / "activations"
        if parse_size(nvme) and filesystem_of(place) in {"tmpfs", "ramfs"}:
            raise InvalidInputError(f"{place} lies in memory: give a directory= on a disk", path=str(place))
        if parse_size(nvme) and not directory:
            make_private(place)
        self._min_bytes = parse_size(min_bytes)
        self._regions = Regions(Space(parse_size(ram)), SpillFile(place, parse_size(nvme)))
        self._choice = KeepChoice(self._regions) if keep == "auto" else None
        self._known: weakref.WeakValueDictionary[Any, Region] = weakref.WeakValueDictionary()
        self._counts = {"saved": 0, "offloaded": 0, "offloaded_bytes": 0}
        self._kept: Counter[str] = Counter()

    def wrap(self, layers: Iterable[torch.nn.Module]) -> None:
        """Checkpoint layers: keep only their inputs, offloaded, and compute the rest again in the backward pass.

        All tensors among the arguments are offloaded, also those passed by keyword, which `torch.utils.checkpoint`
        keeps where no hook sees them. A layer in a `CheckpointWrapper` is still checkpointed once.
        """
        for layer in layers:
            layer.forward = partial(self._checkpoint, getattr(layer, "_checkpoint_wrapped_module", layer.forward))

    def stats(self) -> dict[str, Any]:
        """Return counts of the work so far.

        ``saved``, ``offloaded``, ``kept`` (by reason) and ``failures`` (by kind) count tensors. ``offloaded_bytes`` has
        shared bytes once. ``moved_bytes`` are those that ``drain`` from the GPU, ``write`` to the disk, ``read`` from
        it and ``rise`` to the GPU; ``disk_bytes`` those there now. ``waited_s`` is the time that training waited.
        """
        return {**self._counts, "kept": dict(self._kept), **self._regions.stats()}

    def _checkpoint(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        tensors = [kwargs.pop(name) for name in names]

        def run(*inputs: Any) -> Any:
            return forward(*inputs[: len(args)], **kwargs, **dict(zip(names, inputs[len(args) :], strict=True)))

        with self:
            return checkpoint(run, *args, *tensors, use_reentrant=False)

    def pack_hook(self, tensor: torch.Tensor) -> _Saved:
        """Take over a tensor; for autograd."""
        self._counts["saved"] += 1
        guard, version = tensor.detach(), tensor._version
        reason = _why_kept(tensor, self._min_bytes)
        region, at = (None, 0) if reason else self._region_of(tensor)
        reason = reason or (region.kept if region is not None else "")
        self._kept.update([reason] if reason else [])
        self._counts["offloaded"] += not reason
        if region is None:
            return _Saved(None, 0, guard, guard, version)
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        guard.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return _Saved(region, at, like, guard, version)

    def _region_of(self, tensor: torch.Tensor) -> tuple[Region, int]:
        """Return the region that has a tensor's bytes, known or new, and the tensor's offset in it in bytes."""
        storage = tensor.untyped_storage()
        first, end = _span(tensor)
        whole = storage.nbytes() <= WHOLE_PART * (end - first)
        begin, end = (0, storage.nbytes()) if whole else (first, end)
        reference = StorageWeakRef(storage)
        key = reference.cdata, tensor._version, begin, end
        region = self._known.get(key)
        if region is None:
            accelerator = accelerator_of(tensor)
            record = self._choice.saved(end - begin, is_on_gpu=accelerator is not None) if self._choice else None
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (end - begin,), (1,))
            kept = "auto" if record is not None and record.is_kept else ""
            # The reference keeps the storage's address from being reused while the region lives.
            region = self._regions.hold(source, accelerator, kept, note=(reference, record))
            self._known[key] = region
            self._counts["offloaded_bytes"] += 0 if region.kept else end - begin
        return region, first - begin

    def unpack_hook(self, saved: _Saved) -> torch.Tensor:
        """Return a tensor; for autograd."""
        region, at, like, guard, version = saved
        if guard._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{like.dtype} of shape {list(like.shape)} is at version {guard._version}; expected {version} instead"
            )
        if self._choice is not None:
            self._choice.needed(region.note[1] if region is not None else None)
        if region is None:
            return like
        memory = self._regions.restore(region)
        offset = (memory.storage_offset() + at) // like.itemsize
        found = torch.empty(0, dtype=like.dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), offset, like.shape, like.stride())


def _why_kept(tensor: torch.Tensor, min_bytes: int) -> str:
    """Return why a tensor is not offloaded, before its bytes are looked at."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
        return "parameter"
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return "unusual"
    if tensor.nbytes < max(min_bytes, 1):
        return "small"
    first, end = _span(tensor)
    accelerator = accelerator_of(tensor)
    if end - first > WHOLE_PART * tensor.nbytes or (accelerator is None and tensor.device.type != "cpu"):
        return "unusual"
    return "CUDA graph" if accelerator is not None and accelerator.is_capturing() else ""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.itemsize
    return begin, begin + (last + 1) * tensor.itemsize
