"""Faults of a connection, and the requests that they strike: the input of `TcpFaultProxy`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tierfs.errors import InvalidInputError

__all__ = ["DUPLICATE_BYTES_MAX", "Aim", "PlannedTcpFault", "Side", "TcpFault"]

Side = Literal["request", "response"]
Aim = Callable[[str, str], bool]

DUPLICATE_BYTES_MAX = 64 << 20  # a request is kept in memory until it is sent again


class TcpFault(enum.Enum):
    """The kinds of faults. All but `DUPLICATED` strike at one byte of a request or response."""

    RESET = "reset"
    """The bytes before it are passed on (a slow reader may not get all); then both sides see a reset."""
    BLACK_HOLE = "black-hole"
    """From the byte on nothing passes in either direction, and the connection stays open until the client closes it."""
    TRUNCATED = "truncated"
    """The response ends before the byte, as if that were all. Only responses."""
    BIT_FLIP = "bit-flip"
    """One bit of the byte is another."""
    DUPLICATED = "duplicated"
    """Once the server answers, it is sent the whole request again over a connection of its own. The first answer comes
    back when the second has been read and thrown away. Not for TLS, nor for requests above 64 MiB."""


@dataclass(frozen=True, slots=True)
class PlannedTcpFault:
    """One fault, and the request that it is to strike.

    A connection without HTTP counts as one request, with empty method and path, that is all body.

    Attributes:
        fault: The kind.
        side: Whether it strikes the request or the response on its way.
        at: At which byte, counted from 0. 0 of a response means that the server has carried the request out and the
            client learns nothing of it. ``None``: drawn by the seed, from the whole message where its head tells its
            length, else from what came with the first piece.
        body_only: Count from the first byte after the head, and leave heads alone. The framing of a chunked body is
            body.
        after: How many requests that it might strike it lets pass first.
        aim: By method and path: only requests for which this is true. Called on the proxy's own thread; must not block.
    """

    fault: TcpFault
    side: Side = "response"
    at: int | None = None
    body_only: bool = False
    after: int = 0
    aim: Aim | None = None

    def __post_init__(self) -> None:
        """Refuse a fault that could never strike."""
        if self.side not in ("request", "response"):
            raise InvalidInputError(f"no such side: {self.side!r}")
        if self.fault is TcpFault.TRUNCATED and self.side != "response":
            raise InvalidInputError("truncated can only strike a response")
        if self.at is not None and self.at < 0:
            raise InvalidInputError(f"no such byte: {self.at}")

    def matches(self, method: str, path: str, head_bytes: int, total_bytes: int | None) -> bool:
        """Whether it might strike this request. Facts that are not known yet, the response's length above all, may prevent it.

        Args:
            method: Empty without HTTP.
            path: As the client sent it, query included. Empty without HTTP.
            head_bytes: Of the request's head, blank line included.
            total_bytes: Of the whole request; ``None`` when its head does not tell.
        """
        if self.aim is not None and not self.aim(method, path):
            return False
        if self.fault is TcpFault.DUPLICATED:
            return bool(method) and (total_bytes or 0) <= DUPLICATE_BYTES_MAX
        first = (head_bytes if self.body_only else 0) + (self.at or 0)
        return self.side == "response" or total_bytes is None or first < total_bytes
