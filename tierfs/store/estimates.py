"""What is learned while chunks are encoded and sent: how fast that is, and what tensors of a kind mostly come to. Pure."""

from __future__ import annotations

import math

from tierfs.codec import Codec
from tierfs.codec.choice import Choice
from tierfs.digest import CHUNK_BYTES

__all__ = ["Puts", "Speed", "Typical"]

# How much of a measured speed the newest chunk makes up, and of what is typical the newest tensor.
NEWEST = 0.1
# With each block that is not encoded, the speed that keeps from it comes so much nearer to the best there was, and that to
# nothing: what was slow for a while is measured again after 1 GB, what never was faster after 7.
FORGETTING = 0.001
FORGETTING_BEST = 0.0001
# So many times as slow as is believed is what a chunk counts as at most, where a speed is to be steady: whoever has the processor for a
# moment, as those have that saved, says little of what follows; if it lasts, the next chunks say so.
SURPRISE_MAX = 2.0
# How much of the way one speed of puts comes nearer to the other with each chunk's bytes.
ALIKE = 0.01
# What share of the bytes that are sent has to be encoded for puts to be those of who encodes.
MOST = 0.5
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
    """Seconds that a byte takes on one thread, the newest chunks counting most.

    Args:
        is_steady: Whether one chunk that takes very long is to count little.
    """

    def __init__(self, *, is_steady: bool = False) -> None:
        self._is_steady = is_steady
        self.count = 0
        self.s_per_byte = 0.0
        self._best = math.inf

    def forget(self, blocks: int) -> None:
        """See `FORGETTING`."""
        self._best *= (1 - FORGETTING_BEST) ** blocks
        self.s_per_byte += (self._best - self.s_per_byte) * (1 - (1 - FORGETTING) ** blocks)

    def add(self, count: int, seconds: float, share: float = 1.0) -> None:
        """Learn from so many bytes, which count by a share where others were learned from before."""
        weight = max(share * NEWEST * min(1.0, count / CHUNK_BYTES), count / (self.count + count))
        found = seconds / count
        if self._is_steady and self.s_per_byte:
            found = min(found, SURPRISE_MAX * self.s_per_byte)
        self.s_per_byte += (found - self.s_per_byte) * weight
        self._best = min(self._best, self.s_per_byte)
        self.count += count


class Puts:
    """Seconds that a byte takes on one thread to be sent: while most chunks are encoded, and while most are not.

    While they are, fewer threads send at a time, and have more of the link each. What is not done is not measured: it is taken
    to become faster and slower as what is done does, and with each chunk comes nearer to it. docs/decisions/0033 and 0041.
    """

    def __init__(self) -> None:
        self._raw, self._encoded = Speed(), Speed()
        self._share = 0.0  # of what was sent of late, encoded

    @property
    def count(self) -> int:
        """Bytes so far."""
        return self._raw.count + self._encoded.count

    @property
    def raw_s_per_byte(self) -> float:
        """While most are not encoded, as far as that is known."""
        return (self._raw if self._raw.count else self._encoded).s_per_byte

    @property
    def encoded_s_per_byte(self) -> float:
        """While most are encoded, as far as that is known."""
        return (self._encoded if self._encoded.count else self._raw).s_per_byte

    def with_encoding(self, encode_s: float, ratio: float) -> float:
        """Seconds that a raw byte takes on one thread that encodes it, in so many seconds, and sends what it comes to.

        As long as nobody knows how fast puts are while others encode: what it takes where a link is what they wait for. Then
        each that encodes leaves its share to those that send, and the slower of both is all that is waited for.
        """
        if not self._encoded.count:
            return max(encode_s, ratio * self._raw.s_per_byte)
        # Fewer that send are no slower: if they seem so, something else was slow at the time.
        return encode_s + ratio * min(self._encoded.s_per_byte, self.raw_s_per_byte)

    def add(self, count: int, seconds: float, *, is_raw: bool) -> None:
        """Learn from a chunk."""
        weight = max(NEWEST * min(1.0, count / CHUNK_BYTES), count / (self.count + count))
        self._share += ((not is_raw) - self._share) * weight
        now, other = (self._encoded, self._raw) if self._share >= MOST else (self._raw, self._encoded)
        before = now.s_per_byte
        now.add(count, seconds)
        if other.count:
            other.s_per_byte *= now.s_per_byte / before if before else 1.0
            other.s_per_byte += (now.s_per_byte - other.s_per_byte) * ALIKE * min(1.0, count / CHUNK_BYTES)
