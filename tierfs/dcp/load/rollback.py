"""Rollback: load a save that is still in the device tier from there, device to device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from tierfs.dcp.columns import SavedItem
from tierfs.dcp.tensorbytes import has_shared_elements, narrowed
from tierfs.device.accelerator import GPU_FAILURES
from tierfs.device.tier import DeviceTier, Generation, device_tiers

_logger = logging.getLogger("tierfs.dcp")


def roll_back(
    save_id: str, wanted: Sequence[tuple[Any, SavedItem]], planner: Any
) -> tuple[list[tuple[Any, SavedItem]], int]:
    """Load the items that lie in a device tier of this process.

    All bytes of the snapshot are verified before any is copied.

    Args:
        save_id: The id of the save.
        wanted: torch's `ReadItem`, with the saved chunk or object.
        planner: torch's `LoadPlanner`.

    Returns:
        The items that have to be read elsewhere, and the number of bytes copied.
    """
    rest, copied = list(wanted), 0
    for tier in device_tiers():
        generation = tier.hold(save_id)
        if generation is None:
            continue
        is_intact = True
        try:
            is_intact = tier.is_intact(generation)
            if is_intact:
                rest, count = _copy(tier, generation, rest, planner)
                copied += count
            else:
                _logger.warning(
                    "save %s is in GPU memory but cannot be verified there (CuPy is missing, or the memory was "
                    "overwritten): loading it from the next tier",
                    save_id,
                )
        except GPU_FAILURES as error:
            _logger.warning(
                "save %s is in GPU memory but cannot be copied there: loading it from the next tier: %s", save_id, error
            )
        finally:
            tier.give(generation, drained=is_intact)
    return rest, copied


def _copy(
    tier: DeviceTier, generation: Generation, wanted: Sequence[tuple[Any, SavedItem]], planner: Any
) -> tuple[list[tuple[Any, SavedItem]], int]:
    rest: list[tuple[Any, SavedItem]] = []
    done: list[tuple[Any, torch.Tensor]] = []
    sources: list[torch.Tensor] = []
    accelerator = tier.accelerator
    for item, saved in wanted:
        spot = generation.items.get(item.storage_index) if saved.dtype is not None else None
        source = None if spot is None else generation.tensor(spot)
        if source is None or source.dtype != saved.dtype or tuple(source.shape) != tuple(saved.sizes):
            rest.append((item, saved))
            continue
        target = planner.resolve_tensor(item).detach()
        part = narrowed(source, item.storage_offsets, item.lengths)
        is_alike = target.dtype == part.dtype and target.shape == part.shape and target.layout is torch.strided
        if not (accelerator.owns(target) and is_alike) or has_shared_elements(target):
            rest.append((item, saved))
            continue
        done.append((item, target))
        sources.append(part)
    with torch.no_grad():
        accelerator.copy([target for _, target in done], sources)
    # Wait, before a snapshot on another stream may overwrite the generation.
    accelerator.record(accelerator.current()).synchronize()
    for item, target in done:
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)  # torch did not see the write to its memory
        planner.commit_tensor(item, target)
    return rest, sum(source.nbytes for source in sources)
