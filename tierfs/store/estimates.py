"""What is learned while chunks are encoded and sent: how fast that is, and what tensors of a kind mostly come to. Pure."""

from __future__ import annotations

import math

from tierfs.codec import Codec
from tierfs.codec.choice import Choice
from tierfs.digest import CHUNK_BYTES

__all__ = ["Speed", "Typical"]

# How much of a measured speed the newest chunk makes up, and of what is typical the newest tensor.
NEWEST = 0.1
# With each block that is not encoded, the speed that keeps from it comes so much nearer to the best there was, and that to
# nothing: what was slow for a while is measured again after 1 GB, what never was faster after 7.
FORGETTING = 0.001
FORGETTING_BEST = 0.0001
# What a base saves is found out again after so many were not fetched.
PASSED_MAX = 32


class Typical:
    """What tensors of a kind mostly come to, the newest counting most.

    Attributes:
        codec: How one was encoded last that was.
        ratio: Encoded over raw bytes of those that were.
        saved: What a base saves of the raw size, see `Choice.saved`; ``None`` where that is to be found out.
    """

    def __init__(self) -> None:
        self.codec = Codec.STORE
        self.ratio = 1.0
        self.saved: float | None = None
        self._passed = 0

    def pass_by(self) -> None:
        """Note that a base was not fetched."""
        self._passed += 1
        if self._passed >= PASSED_MAX:
            self.saved, self._passed = None, 0

    def add(self, choice: Choice) -> None:
        """Learn from what was found out about one tensor."""
        coding, ratio = choice.static, choice.static_ratio
        if choice.delta is not None and choice.delta_ratio is not None:
            coding, ratio = choice.delta, choice.delta_ratio
        if coding.codec is not Codec.STORE:
            self.ratio += (ratio - self.ratio) * (1 if self.codec is Codec.STORE else NEWEST)
            self.codec = coding.codec
        if choice.delta_ratio is not None:
            self.saved = choice.saved if self.saved is None else self.saved + (choice.saved - self.saved) * NEWEST


class Speed:
    """Seconds that a byte takes on one thread, the newest chunks counting most."""

    def __init__(self) -> None:
        self.count = 0
        self.s_per_byte = 0.0
        self._best = math.inf

    def forget(self, blocks: int) -> None:
        """See `FORGETTING`."""
        self._best *= (1 - FORGETTING_BEST) ** blocks
        self.s_per_byte += (self._best - self.s_per_byte) * (1 - (1 - FORGETTING) ** blocks)

    def add(self, count: int, seconds: float) -> None:
        """Learn from so many bytes."""
        weight = max(NEWEST * min(1.0, count / CHUNK_BYTES), count / (self.count + count))
        self.s_per_byte += (seconds / count - self.s_per_byte) * weight
        self._best = min(self._best, self.s_per_byte)
        self.count += count
