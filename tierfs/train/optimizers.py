"""The state of an optimizer: how torch makes it, what a load changes of it, and gradients that no step has used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

HAS_GRADIENTS = "has_gradients"
"""The fact about a state, among those of `About`, that there were gradients which no step had used."""
_USED = "_tierfs_used"
"""The attribute of a gradient that has its version at the last step of an optimizer."""


@contextmanager
def as_saved(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a load inside the context set the optimizer's state as it was saved.

    torch casts the state to the dtypes of the parameters, and drops that of frozen ones.
    """
    given: list[Mapping[str, Any]] = []
    taking = optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    frozen = [each for each in parameters_of(optimizer) if not each.requires_grad and optimizer.state.get(each)]
    try:
        for each in frozen:
            each.requires_grad = True
        yield
    finally:
        taking.remove()
        for each in frozen:
            each.requires_grad = False
    for state in given:
        numbers = (number for group in state["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
            if number in state["state"]:
                optimizer.state[parameter] = _in_dtypes_of(state["state"][number], optimizer.state[parameter])


def _in_dtypes_of(saved: Any, live: Any) -> Any:
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.detach().to(live.device, copy=True)
    if isinstance(live, dict):
        return {key: _in_dtypes_of(saved[key], each) if key in saved else each for key, each in live.items()}
    if type(live) in {list, tuple}:
        return type(live)(_in_dtypes_of(*pair) for pair in zip(saved, live, strict=True))
    return live


@contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters, and restore their gradients and the learning rates.

    torch changes both while it makes an optimizer's state, and leaves them so if that fails.
    """
    groups = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    parameters = list(parameters_of(optimizer))
    gradients = [each.grad for each in parameters]
    try:
        yield parameters
    finally:
        for group, rate in groups:
            group["lr"] = rate
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient


@contextmanager
def complete_state(optimizer: torch.optim.Optimizer, *, is_whole: bool) -> Iterator[None]:
    """Let torch make the state that parameters lack, to load into. If that fails, the state stays as it was.

    torch makes it only for an optimizer that has neither state nor gradients. Without it, saved state would be skipped.
    If not all saved state is loaded (``is_whole``), the optimizer keeps the state that it has.
    """
    before = dict(optimizer.state)
    with unchanged(optimizer) as parameters:
        # Where no parameter lacks state, the load uses its memory.
        if is_whole and not all(optimizer.state.get(each) for each in parameters):
            optimizer.state.clear()
        for each in parameters:
            each.grad = None
        try:
            yield
        except BaseException:
            optimizer.state.clear()
            optimizer.state.update(before)
            raise


def _note_used(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note at each gradient that the optimizer made a step with it as it is now: 0.1 ms for 1,000 of them."""
    if not torch.compiler.is_compiling():
        for gradient in _gradients(parameters_of(optimizer)):
            setattr(gradient, _USED, gradient._version)


register_optimizer_step_post_hook(_note_used)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (getattr(grad, "_local_tensor", grad) for each in parameters if (grad := each.grad) is not None)


def gradients_of(optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Say for `About` whether there are gradients that no step of an optimizer has used. A checkpoint has no gradients."""
    modules = list(modules)
    unused = (each for each in _gradients(_all_of(optimizers, modules)) if getattr(each, _USED, None) != each._version)
    has_some = any(bool(each.any()) for each in unused) or any(map(_waits_in_fsdp, modules))
    return {HAS_GRADIENTS: True} if has_some else {}


def drop_gradients(optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]) -> list[str]:
    """Drop the gradients of the steps before a restore. Return a note if FSDP 2 holds some that it has not reduced."""
    modules = list(modules)
    for each in _all_of(optimizers, modules):
        each.grad = None
    is_held = any(map(_waits_in_fsdp, modules))
    return ["FSDP 2 holds gradients of a step before the restore: restore between steps"] if is_held else []


def _all_of(optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    found = {id(each): each for optimizer in optimizers for each in parameters_of(optimizer)}
    found |= {id(each): each for module in modules for each in module.parameters()}
    return list(found.values())


def _waits_in_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP 2 has gradients that it has not reduced yet. The parameters do not have them."""
    for each in module.modules():
        state: Any = each._get_fsdp_state() if isinstance(each, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            if group is None:
                continue
            held = [getattr(getattr(own, "_unsharded_param", None), "grad", None) for own in group.fsdp_params]
            held += [group._partial_reduce_output, *(own.unsharded_accumulated_grad for own in group.fsdp_params)]
            if any(gradient is not None for gradient in held):
                return True
    return False
