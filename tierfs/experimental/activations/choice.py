"""The choice of ``keep="auto"``: keep the tensors that could not come back in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tierfs.experimental.activations.regions import AHEAD, SPILL_FROM, Regions
from tierfs.units import format_bytes

LEARN_STEPS = 3
"""Steps that offload everything. The last one is measured, when memory and disk are warm."""
CHANGED = 0.1
"""A step that saves this part more or less than the measured one begins a new measurement."""
_logger = logging.getLogger("tierfs.activations")


@dataclass(slots=True)
class SavedTensor:
    """One tensor of a step. Times are in seconds, without those for which training waited; 0 for not yet."""

    length: int
    is_on_gpu: bool
    saved_s: float
    needed_s: float = 0.0
    is_kept: bool = False


class KeepChoice:
    """Measures steps, then chooses by the position in a step: each step saves its tensors in the same order."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._records: list[SavedTensor] = []  # of this step
        self._learnt: list[SavedTensor] = []  # of the measured step
        self._steps = 0
        self._is_backward = False

    def saved(self, length: int, *, is_on_gpu: bool) -> SavedTensor:
        """Note that a tensor was saved. Return its record, with the choice."""
        if self._is_backward:
            self._end_step()
        at = len(self._records)
        is_kept = at < len(self._learnt) and self._learnt[at].is_kept
        self._records.append(SavedTensor(length, is_on_gpu, time.monotonic() - self._regions.waited_s, is_kept=is_kept))
        return self._records[-1]

    def needed(self, record: SavedTensor | None) -> None:
        """Note that the backward pass needs a tensor."""
        self._is_backward = True
        if record is not None and not record.needed_s:
            record.needed_s = time.monotonic() - self._regions.waited_s

    def _end_step(self) -> None:
        records, self._records, self._is_backward = self._records, [], False
        wanted, found = (sum(record.length for record in some) for some in (self._learnt, records))
        if wanted and abs(found - wanted) > CHANGED * wanted:
            self._steps, self._learnt = 0, []
        self._steps += 1
        if self._steps != LEARN_STEPS or not records:
            return
        cost = {step: self._regions.moved_s[step] / moved for step, moved in self._regions.moved_bytes.items() if moved}
        choose(records, self._regions.memory.size, cost)
        self._learnt = records
        kept = [record.length for record in records if record.is_kept]
        rates = ", ".join(f"{step} {format_bytes(int(1 / one))}/s" for step, one in cost.items())
        forward_s = records[-1].saved_s - records[0].saved_s
        _logger.info(
            "activations: %d of %d tensors (%s of %s a step) are kept, because they could not come back in time: the "
            "forward pass takes %.3f s; %s",
            *(len(kept), len(records), format_bytes(sum(kept)), format_bytes(found), forward_s, rates),
        )


def choose(records: Sequence[SavedTensor], ram_bytes: int, cost: dict[str, float]) -> None:
    """Mark the records to keep: those that the links cannot move down before the forward pass ends, or up in time.

    The records of a step come in the order in which they were saved. ``cost`` has the seconds that each link, named as
    in `Regions.moved_bytes`, takes for a byte.
    """
    # The newest tensors stay in RAM. Each older one goes to the disk when newer ones need its room.
    pushed_s = [0.0] * len(records)
    held = oldest = 0
    for record in records:
        held += record.length
        while held > ram_bytes * SPILL_FROM:
            pushed_s[oldest] = record.saved_s
            held, oldest = held - records[oldest].length, oldest + 1
    free_s: dict[str, float] = {}  # when each link is free

    def passes(record: SavedTensor, starts: dict[str, float], limit_s: float) -> bool:
        done, at = {}, 0.0
        for link, start in starts.items():
            if start:
                at = done[link] = max(free_s.get(link, 0.0), start, at) + record.length * cost.get(link, 0.0)
        free_s.update(done if at <= limit_s else {})
        return at <= limit_s

    ends_s = records[-1].saved_s
    for record, pushed in zip(records, pushed_s, strict=True):
        record.is_kept = not passes(record, {"drain": record.saved_s * record.is_on_gpu, "write": pushed}, ends_s)
    needed_s = [ends_s] * AHEAD
    for record, pushed in reversed([*zip(records, pushed_s, strict=True)]):
        if record.needed_s and not record.is_kept and (pushed or record.is_on_gpu):
            ready = needed_s[-AHEAD]
            starts = {"read": ready * bool(pushed), "rise": ready * record.is_on_gpu}
            record.is_kept = not passes(record, starts, record.needed_s)
            needed_s += [] if record.is_kept else [record.needed_s]
