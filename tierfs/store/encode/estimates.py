"""What is learned while chunks are encoded and sent: how fast that is, and what tensors of a kind mostly come to. Pure."""

from __future__ import annotations

import math
from copy import copy

from tierfs.codec import Codec
from tierfs.codec.choice import Choice
from tierfs.digest import CHUNK_BYTES

__all__ = ["EVIDENCE_BYTES", "EXPIRES_BYTES", "Puts", "Speed", "Typical"]

# How much of a measured speed the newest chunk makes up, and of what is typical the newest tensor.
NEWEST = 0.1
# With each block that is not encoded, the speed that keeps from it comes so much nearer to the best there was, and that to
# nothing: what was slow for a while is measured again after 4 GB, what never was faster after 28.
FORGETTING = 0.00025
FORGETTING_BEST = 0.000025
# So many times as slow as is believed is what a chunk counts as at most, where a speed is to be steady: whoever has the processor for a
# moment, as those have that saved, says little of what follows; if it lasts, the next chunks say so.
SURPRISE_MAX = 2.0
EVIDENCE_BYTES = 64 << 20
"""So much has to have been sent before a speed counts: a few small puts say little."""
# What share of the bytes that were sent of late has to be encoded for puts to be those of who encodes; and how much of it the
# newest chunk makes up.
MOST = 0.5
NEWEST_SENT = 0.25
# What is not done is found out again after so much, or when what is done takes so many times as long, or less.
EXPIRES_BYTES = 4 << 30
CHANGED = 1.5
# The fastest put of no more than this took what every put takes, whatever it sends; with each, that is believed to have grown a little.
LITTLE_BYTES = 256 << 10
GROWING = 0.001
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

    def add(self, count: int, seconds: float) -> None:
        """Learn from so many bytes."""
        weight = max(NEWEST * min(1.0, count / CHUNK_BYTES), count / (self.count + count))
        found = seconds / count
        if self._is_steady and self.s_per_byte:
            found = min(found, SURPRISE_MAX * self.s_per_byte)
        self.s_per_byte += (found - self.s_per_byte) * weight
        self._best = min(self._best, self.s_per_byte)
        self.count += count


class Puts:
    """Seconds that a byte takes on one thread to be sent: while most chunks are encoded, and while most are not.

    While they are, fewer threads send at a time, and have more of the link each; or all of them have less of the processors. Which
    it is only trying tells: what is not done counts as it was found while nothing seems to have changed, and for `EXPIRES_BYTES`, then it
    is tried again. What a put takes however little it sends is left out, as encoding saves none of that. docs/decisions/0042.

    Args:
        tries: Whether encoding is tried where nobody knows how fast puts are then; else they are taken to be as fast as raw ones.

    Attributes:
        count: Bytes so far.
    """

    def __init__(self, *, tries: bool = True) -> None:
        self.count = 0
        self._tries = tries
        self._raw, self._encoded = Speed(), Speed()
        self._share = 0.0  # of what was sent of late, encoded
        self._is_encoding = False  # whether that is most
        self._since = 0  # bytes since that is so, or since what is not done was forgotten
        self._then: float | None = None  # what a byte took when enough had been sent since
        self._tried = 0  # bytes that were encoded while most were not, and nobody knew how it is when most are
        self._least_s = math.inf  # what every put takes, as far as that is known

    @property
    def raw_s_per_byte(self) -> float:
        """While most are not encoded. As long as nobody knows: what makes raw puts be tried, but where encoding saves so much that they need not be."""
        if _is_known(self._raw) or not self._encoded.s_per_byte:
            return self._raw.s_per_byte
        return self._encoded.s_per_byte / CHANGED

    @property
    def encoded_s_per_byte(self) -> float:
        """While most are encoded, as far as that is known."""
        return (self._encoded if self._encoded.s_per_byte else self._raw).s_per_byte

    def with_encoding(self, encode_s: float, ratio: float) -> float:
        """Seconds that a raw byte takes on one thread that encodes it, in so many seconds, and sends what it comes to.

        As long as nobody knows how fast puts are while others encode: what it takes where a link is what they wait for. Then
        each that encodes leaves its share to those that send, and the slower of both is all that is waited for.
        """
        if not _is_known(self._encoded):
            send_s = ratio * self.raw_s_per_byte
            return max(encode_s, send_s) if self._tries else encode_s + send_s
        return encode_s + ratio * self._encoded.s_per_byte

    def add(self, count: int, seconds: float, *, is_raw: bool) -> None:
        """Learn from a chunk."""
        if count <= LITTLE_BYTES:
            self._least_s = min(self._least_s * (1 + GROWING), seconds)
        elif self._least_s < math.inf:
            self._least_s = min(self._least_s, seconds)
        if self._least_s < math.inf:
            seconds -= min(self._least_s, seconds / 2)
        self._share += ((not is_raw) - self._share) * (
            NEWEST_SENT * min(1.0, count / CHUNK_BYTES) if self.count else 1.0
        )
        if (self._share >= MOST) is not self._is_encoding:
            self._is_encoding = not self._is_encoding
            self._since, self._then = 0, None
        now = self._encoded if self._is_encoding else self._raw
        now.add(count, seconds)
        if not self._is_encoding and not _is_known(self._encoded):
            self._tried += 0 if is_raw else count
            if self._tried >= EVIDENCE_BYTES:
                # And yet most are not: little can be encoded, and puts are the same either way.
                self._encoded, self._tried = copy(self._raw), 0
        self.count += count
        self._since += count
        if self._since >= EVIDENCE_BYTES:
            self._forget(now)

    def _forget(self, now: Speed) -> None:
        """Forget what was found of what is not done, if it does not count any more."""
        self._then = now.s_per_byte if self._then is None else self._then
        is_changed = not self._then / CHANGED <= now.s_per_byte <= self._then * CHANGED
        if not is_changed and self._since < EXPIRES_BYTES:
            return
        if self._is_encoding:
            self._raw = Speed()
        else:
            self._encoded = Speed()
        self._since, self._then, self._tried = 0, None, 0
        if is_changed:
            now.count = 0  # what comes counts, not what was on the way to it


def _is_known(speed: Speed) -> bool:
    return speed.count >= EVIDENCE_BYTES
