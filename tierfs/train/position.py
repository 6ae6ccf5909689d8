"""The values of a single rank: positions of data loaders, random generators on the CPU and each GPU, and buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from tierfs.digest import checksum
from tierfs.errors import InvalidInputError
from tierfs.train.values import has_digest

BUFFERS = "buffers"
"""The name of the value that holds this rank's buffers."""
SAMPLED_MAX = 64
"""A save samples at most this many parameters, so that it takes less than a millisecond of the training thread."""
FROZEN = "the parameters that need no gradient"


def positions(loaders: Sequence[Any]) -> dict[str, Any]:
    """Return the positions of data loaders, each with its epoch and the facts that the position depends on."""
    return {
        "loaders": [
            {
                "state": each.state_dict(),
                "epoch": next(
                    (one.epoch for one in _samplers_of(each) if isinstance(getattr(one, "epoch", None), int)), None
                ),
                "facts": _facts_of(each),
                "generators": [generator.get_state() for generator in _generators_of(each)],
            }
            for each in loaders
        ]
    }


def set_positions(loaders: Sequence[Any], saved: Any, epoch: int) -> list[str]:
    """Set the positions that `positions` returned. Return in words why the data differs; empty if it is the same.

    ``epoch`` is for loaders that do not tell theirs.

    Raises:
        InvalidInputError: A loader does not take its position, for example because its data set is shorter.
    """
    found = saved["loaders"]
    if len(found) != len(loaders):
        return [
            f"{len(found)} data loaders were saved, but the state has {len(loaders)}: none is at its saved position"
        ]
    notes = []
    for loader, each in zip(loaders, found, strict=True):
        now, then = _facts_of(loader), each.get("facts", {})
        changed = "; ".join(
            f"{name} is {now.get(name)}, not {then[name]}" for name in then if now.get(name) != then[name]
        )
        for sampler in _samplers_of(loader):
            # The loader makes its iterator below. That fixes the order of the data, which follows from the epoch.
            sampler.set_epoch(epoch if each.get("epoch") is None else each["epoch"])
        try:
            loader.load_state_dict(each["state"])
            # torchdata's loader makes its iterator here instead of in the loop. The uninterrupted run has one already, and
            # making it draws a random number.
            loader.state_dict()
        except Exception as error:
            raise InvalidInputError(
                f"the data loader, a {type(loader).__name__}, does not take its saved position: {changed or repr(error)}. "
                "Give it the data and the settings of the save, or TrainState(dataloader=None) to begin the data anew"
            ) from error
        # torchdata's loader without workers leaves its generator where its next epoch gets another order.
        for generator, drawn in zip(_generators_of(loader), each.get("generators", ()), strict=False):
            generator.set_state(drawn)
        if changed:
            notes.append(f"the data loader goes on with other data: {changed}")
    return notes


def _facts_of(loader: Any) -> dict[str, Any]:
    found = {}
    for each in _torch_loaders(loader):
        with suppress(TypeError, NotImplementedError):  # an iterable data set need not know its length
            found["length of the data set"] = len(each.dataset)
        found |= {"batch_size": each.batch_size, "num_workers": each.num_workers}
    return found


def _samplers_of(loader: Any) -> list[Any]:
    """Return the parts of a loader that take an epoch, which decides the order of the data."""
    return [part for part in _parts_of(loader) if hasattr(part, "set_epoch")]


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the random generators of a loader and its samplers, each once."""
    found = {id(each): each for part in _parts_of(loader) if (each := getattr(part, "generator", None)) is not None}
    return [each for each in found.values() if isinstance(each, torch.Generator)]


def _parts_of(loader: Any) -> list[Any]:
    found: dict[int, Any] = {}
    for each in _torch_loaders(loader):
        inner = getattr(each.batch_sampler, "sampler", None)
        found |= {id(part): part for part in (each, each.sampler, each.batch_sampler, inner, each.dataset)}
    return list(found.values())


def _torch_loaders(loader: Any) -> list[Any]:
    """Return the loaders of torch that an object is, or has as attributes."""
    return [each for each in (loader, *getattr(loader, "__dict__", {}).values()) if isinstance(each, DataLoader)]


def generators() -> dict[str, Any]:
    """Return the state of each generator by name, as plain values and tensors."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the one that libraries use
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_generators(states: dict[str, Any]) -> list[str]:
    """Set the states that `generators` returned. Return in words which could not be set; empty if all were."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    saved = states.get("cuda", [])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved and here:
        torch.cuda.set_rng_state_all(saved[:here])
    if len(saved) != here:
        return [f"random generators of {len(saved)} GPUs were saved, but this process sees {here} GPUs"]
    return []


def reseed(*words: object) -> int:
    """Seed all generators from a hash of ``words``, so that equal words give equal seeds. Return the seed."""
    seed = int.from_bytes(checksum(repr(words).encode())[:4], "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return seed


class ModuleBuffers:
    """The buffers of modules, as far as they are no shards. Each rank changes its own, as batch norm does.

    A checkpoint holds one copy of a value that several ranks have. So each of several ranks saves the bytes of its own
    buffers once more, one after the other in one tensor.

    ``modules`` has each module under a name of its own.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def _of(self, *, is_saved: bool) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for path, module in (pair for name, each in self._modules.items() for pair in each.named_modules(prefix=name)):
            for name, buffer in module.named_buffers(recurse=False):
                if (name not in module._non_persistent_buffers_set) is is_saved and id(buffer) not in seen:
                    seen.add(id(buffer))
                    if has_digest(buffer) and (type(buffer) in {torch.Tensor, nn.Buffer} or not is_saved):
                        yield f"{path}.{name}".removeprefix("."), buffer.detach()

    def to_save(self) -> dict[str, Any]:
        """Return a copy of this rank's buffers as bytes; nothing if there is only one rank, or no buffer."""
        own = [_bytes_of(each) for _, each in self._of(is_saved=True)] if _has_others() else []
        return {BUFFERS: torch.cat([each.to(own[0].device) for each in own])} if own else {}

    def to_load(self, *, is_saved: bool) -> dict[str, Any]:
        """Return memory to load them into; nothing if they were not saved."""
        return self.to_save() if is_saved else {}

    def addresses(self) -> set[int]:
        """Return the addresses of the buffers that `to_save` copies."""
        return {address_of(each) for _, each in self._of(is_saved=True)} if _has_others() else set()

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Set the buffers to the loaded bytes, if there are any."""
        rest = values.get(BUFFERS, torch.empty(0))
        for _, each in self._of(is_saved=True) if len(rest) else ():
            taken, rest = rest[: each.nbytes], rest[each.nbytes :]
            each.copy_(taken.clone().to(each.device).view(each.dtype).view(each.shape))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the modules' parameters, each once with its name, in which nothing tells whether it was compiled."""
        named = (pair for name, each in self._modules.items() for pair in each.named_parameters(prefix=name))
        seen: set[int] = set()
        for name, each in named:
            if id(each) not in seen:
                seen.add(id(each))
                yield name.replace("_orig_mod.", ""), each

    def left_out(self) -> list[str]:
        """Return the names of parameters and persistent buffers that the ``state_dict`` of their module leaves out."""
        found = []
        for place, module in self._modules.items():
            if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
                continue  # its state is a copy of the parameters, made by all ranks
            state = module.state_dict()
            held = {address_of(each) for each in state.values() if isinstance(each, torch.Tensor)}
            own = {**dict(module.named_parameters()), **dict(ModuleBuffers({"": module})._of(is_saved=True))}
            found += [
                f"{place}.{name}" for name, each in own.items() if name not in state and address_of(each) not in held
            ]
        return found

    def unsaved(self) -> dict[str, Any]:
        """Return copies of the buffers that are not persistent, and the names of the parameters that need no gradient."""
        frozen = sorted(name for name, each in self.parameters() if not each.requires_grad)
        buffers = {f"the buffer {name}": each.clone() for name, each in self._of(is_saved=False)}
        return {**buffers, **self._samples(), FROZEN: repr(frozen)} if self._modules else {}

    def _samples(self) -> dict[str, torch.Tensor]:
        """Return some bytes of the parameters by device, if there are several ranks.

        A checkpoint holds one rank's copy of a parameter that is no shard. So a restore notes that the ranks' differed.
        """
        own = [each.detach() for _, each in self.parameters() if type(each) is nn.Parameter] if _has_others() else []
        found: dict[str, list[torch.Tensor]] = {}
        for each in own[:: -(-len(own) // SAMPLED_MAX) or 1]:
            row = each[(slice(1),) * (each.dim() - 1)]
            found.setdefault(str(each.device.type), []).append(_bytes_of(row)[:64])
        return {f"the parameters of this rank on {device}": torch.cat(rows) for device, rows in found.items()}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def address_of(tensor: torch.Tensor) -> int:
    """Return where this rank's part of a tensor lies."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


def _has_others() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
