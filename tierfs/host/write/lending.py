"""Slots that this process lent to another one: given back here when that is done with them, but for what a draft names.

Whoever makes a draft of lent slots does so while it has the loan. So once that is over, the drafts say what became of
them: those that one names are the flusher's business, the others are free.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierfs._fork import renew_in_children
from tierfs.clock import Clock
from tierfs.errors import TierfsError
from tierfs.host.pending.record import SlotRef
from tierfs.host.pending.scan import PendingDrafts
from tierfs.host.rpc.handover import Handover
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot, SlotState

__all__ = ["Lending", "Loan"]

# What nobody here refers to any more, and nobody has had yet, may still be in a pipe.
UNTAKEN_S_MAX = 60.0
HAND_OVER_S = 10.0
_logger = logging.getLogger("tierfs.flush")


@dataclass(slots=True, eq=False)
class Loan:
    """Slots that were lent.

    Attributes:
        path: The loan's file.
        slots: Which.
        dropped_s: Since when nobody here refers to them, monotonic seconds.
    """

    path: Path
    slots: tuple[Slot, ...]
    dropped_s: float | None = None


class Lending:
    """Lends slots of this process. Safe for use by many threads.

    Args:
        ram: The ram tier.
        drafts: What is pending.
        handover: Gives the flusher memory that no file leads to.
        clock: Where time comes from.

    Attributes:
        store: The store's uuid, 32 hex digits.
    """

    def __init__(self, ram: RamTier, drafts: PendingDrafts, handover: Handover, clock: Clock) -> None:
        self.store = ram.store
        self._ram = ram
        self._drafts = drafts
        self._handover = handover
        self._clock = clock
        self._loans: list[Loan] = []
        self._lock = threading.Lock()
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"Lending({len(self._loans)} loans)"

    def lend(self, slots: Sequence[Slot]) -> Loan:
        """Lend sealed slots to another process. They are given back here as soon as that had them and is done with them.

        Raises:
            StoreError, TimeoutError: They cannot be lent.
        """
        if self._handover.is_needed():
            # Who borrows gets a descriptor of its own. But a draft that names the slots may outlive us.
            self._handover.ask("draft", {}, timeout_s=HAND_OVER_S)
        path = self._ram.loans.lend(self._ram.host.owner(), dict.fromkeys(slot.segment.id for slot in slots))
        loan = Loan(path, tuple(slots))
        self._loans.append(loan)
        return loan

    def drop(self, loan: Loan) -> None:
        """Say that nobody here refers to it any more. May be called from anywhere, a finalizer too."""
        loan.dropped_s = self._clock.monotonic()

    def settle(self) -> None:
        """Give back what can be by now. Does nothing while another thread does it."""
        if not self._loans or not self._lock.acquire(blocking=False):
            return
        try:
            over = [loan for loan in list(self._loans) if self._is_over(loan)]
            named = self._drafts.named_slots() if over else None
            if named is None:
                return
            for loan in over:
                for slot in loan.slots:
                    if SlotRef(slot.segment.id, slot.index, slot.serial) not in named:
                        _give(slot)
                self._loans.remove(loan)
        except (TierfsError, OSError) as error:
            _logger.debug("what was lent is not given back yet: %s", error)
        finally:
            self._lock.release()

    def _is_over(self, loan: Loan) -> bool:
        is_late = loan.dropped_s is not None and self._clock.monotonic() - loan.dropped_s >= UNTAKEN_S_MAX
        return self._ram.loans.end(loan.path, only_taken=not is_late)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._loans = []  # the parent's


def _give(slot: Slot) -> None:
    """Free a slot of ours, unless a lower tier has it by now, and it is a copy worth to be kept."""
    segment = slot.segment
    found = segment.slot(slot.index) if segment.owned else None
    if found is not None and found.state is not SlotState.CLEAN:
        segment.give(slot)
