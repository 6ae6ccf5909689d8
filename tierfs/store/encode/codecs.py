"""The codecs that a store's chunks may have: the option ``codecs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tierfs.codec import Codec
from tierfs.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codecs that the encoder may use.

    Attributes:
        allowed: The codecs. Always has STORE. Has CONST unless STORE is the only one: a block for which CONST is right
            is not tried with any other codec.
        always: Encode under any pressure.
    """

    allowed: frozenset[Codec] = frozenset(Codec)
    always: bool = False

    @classmethod
    def parse(cls, text: str) -> Codecs:
        """Parse the option: ``auto``, ``all``, ``off``, or names like ``"zstd,plane"``.

        ``all`` uses all codecs wherever they save bytes, and ``auto`` does so too except under pressure.

        Raises:
            InvalidInputError: ``text`` is none of these.
        """
        if text == "auto":
            return cls()
        if text == "all":
            return cls(always=True)
        if text == "off":
            return cls(frozenset({Codec.STORE}))
        names = [name.strip().upper() for name in text.split(",")]
        unknown = [name for name in names if name not in Codec.__members__]
        if unknown:
            known = ", ".join(codec.name.lower() for codec in Codec)
            raise InvalidInputError(f"codecs={text!r} is invalid: choose auto, all, off, or names among {known}")
        implied = {Codec.STORE} if names == ["STORE"] else {Codec.STORE, Codec.CONST}
        return cls(frozenset({*implied, *(Codec[name] for name in names)}), always=True)

    def __str__(self) -> str:
        if self.allowed == frozenset(Codec):
            return "all" if self.always else "auto"
        return ",".join(codec.name.lower() for codec in sorted(self.allowed))


AUTO = Codecs()
Pressure: TypeAlias = Literal["none", "caller", "backlog"]
"""Why a chunk has to be sent soon: not at all, for a caller that waits for the object tier, or for room in the local tiers."""
