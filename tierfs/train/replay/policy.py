"""`Replay`: the save policy that logs each step, and the optimizers whose steps can be made again exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level
from tierfs.train.policies import Context
from tierfs.units import parse_size

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
"""Optimizers that compute each element of a parameter from the same element of its gradient and state."""
AGAIN_SHARE = 0.25
"""The aim for the share of a step's time that making it again takes; ``integration/bench/replay.py`` measured less."""


class StepLog:
    """The state of the log of one rank, which its policy needs.

    Attributes:
        chain: The chain that the next file belongs to; empty while nothing is logged.
        wants_save: Whether the log needs a full save.
        is_fresh: Whether nothing was saved or restored yet, the same on all ranks.
        is_between: Whether the last step left gradients that no optimizer has used.
    """

    def __init__(self) -> None:
        self.chain = ""
        self.wants_save = self.is_fresh = True
        self.is_between = False


@dataclass(slots=True, eq=False)
class Replay:
    """Logs what the optimizer gets at each step, so that a restore makes the steps after the last full save again.

    The files stay in memory, and are removed once a later full save is complete. It asks for a full save if there
    is none to begin from, and when the log has no room. A restore stops at the last step that is certainly exact.

    Args:
        every: Steps in one file of the log. A killed process loses the steps that have no file yet.
        ring: The most bytes of the log of each rank, such as ``"8GiB"``. In memory, the log has this beside the ram tier.
        prove_every: Each file with a step that is a multiple of this has a digest of the state after it, which the
            restore compares.
        level: ``"staged"``: files stay in shared memory, which outlives the processes but not the host. ``"local"``,
            ``"peer"``, ``"object"``: they go on as any file does, and stay until a full save has reached this level.
        elementwise: Further classes of optimizers whose update is elementwise: each element of a parameter follows from
            the same element of its gradient and state alone.
        allow_approximate: Accept optimizers that are not known to be elementwise. A restore that makes their steps
            again is not exact, and says so.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    every: int = 1
    ring: str | int = "8GiB"
    prove_every: int = 50
    level: str = "staged"
    elementwise: Sequence[type] = ()
    allow_approximate: bool = False
    recorder: StepLog | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("every", "prove_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"Replay({name}={value!r}): must be an integer of at least 1")
        self.ring_bytes  # noqa: B018 - raises if it is invalid
        Level.parse(self.level)

    @property
    def ring_bytes(self) -> int:
        """The most bytes of the log of each rank."""
        return parse_size(self.ring)

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks know the answer of `should_save`: only before the first save, which is at the first step."""
        return self.recorder is not None and self.recorder.is_fresh

    @property
    def lost_share(self) -> float:
        """The share of the time since the last full save that a failure costs."""
        return AGAIN_SHARE if self.recorder is not None and self.recorder.chain else 1.0

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether the log needs a full save: to begin from, or to make room.

        But for the first one, it waits for a step that leaves no gradients unused, which no save has.
        """
        recorder = self.recorder
        if recorder is None or recorder.is_fresh:
            return recorder is not None
        return recorder.wants_save and not recorder.is_between and not context.is_saving

    def reason_against(self, optimizer: torch.optim.Optimizer) -> str:
        """Return why an optimizer's steps cannot be made again exactly; empty if they can."""
        kind = type(optimizer)
        if kind in ELEMENTWISE or kind in self.elementwise:
            return ""
        return f"the steps of {kind.__name__} cannot be made again bit for bit: it is not known to be elementwise"

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that the steps of these optimizers can be made again.

        Raises:
            InvalidInputError: One is not known to be elementwise, and ``allow_approximate`` is not set.
        """
        for optimizer in optimizers if not self.allow_approximate else ():
            if why := self.reason_against(optimizer):
                raise InvalidInputError(
                    f"Replay: {why}: name its class in elementwise=[...] if it is, or set allow_approximate=True"
                )
