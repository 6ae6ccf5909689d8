"""Faults of a connection, and the requests that they strike: the input of `TcpFaultProxy`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tierfs.errors import InvalidInputError

Side = Literal["request", "response"]
Aim = Callable[[str, str], bool]

DUPLICATE_BYTES_MAX = 64 << 20  # the proxy keeps a request in memory until it sends the copy


class TcpFault(enum.Enum):
    """The kinds of faults. Each but `DUPLICATED` strikes at one byte of a request or response."""

    RESET = "reset"
    """The bytes before that byte are passed on, but a slow reader may miss some. Then both sides see a reset."""
    BLACK_HOLE = "black-hole"
    """From that byte on, nothing passes in either direction. The connection stays open until the client closes it."""
    TRUNCATED = "truncated"
    """The response ends before that byte, as if it were complete. Only for responses."""
    BIT_FLIP = "bit-flip"
    """One bit of that byte is flipped."""
    DUPLICATED = "duplicated"
    """When the server answers, the proxy sends it the whole request again over another connection. The client gets the
    first answer after the proxy has read and dropped the second. Not for TLS that the proxy does not end, nor for
    requests over 64 MiB."""


@dataclass(frozen=True, slots=True)
class PlannedTcpFault:
    """One fault, and the request that it strikes.

    A connection without HTTP counts as one request with an empty method, an empty path and no head.

    Attributes:
        fault: The kind.
        side: Strike the request or the response.
        at: Strike at this byte, counted from 0. Byte 0 of a response means that the server has carried out the request
            and the client does not learn of it. None: the seed draws the byte from the whole message if its head gives
            the length, else from the first piece that arrives.
        body_only: Count from the first byte after the head, and never strike a head. The framing of a chunked body is
            part of the body.
        after: Number of matching requests that pass before the fault strikes.
        aim: Called with method and path; strike only requests for which it returns true. It runs on the proxy's thread,
            so it must not block.
    """

    fault: TcpFault
    side: Side = "response"
    at: int | None = None
    body_only: bool = False
    after: int = 0
    aim: Aim | None = None

    def __post_init__(self) -> None:
        """Refuse a fault that can never strike.

        Raises:
            InvalidInputError: ``side`` or ``at`` is invalid, or the fault cannot strike that side.
        """
        if self.side not in ("request", "response"):
            raise InvalidInputError(f"no such side: {self.side!r}")
        if self.fault is TcpFault.TRUNCATED and self.side != "response":
            raise InvalidInputError("truncated can only strike a response")
        if self.at is not None and self.at < 0:
            raise InvalidInputError(f"no such byte: {self.at}")

    def matches(self, method: str, path: str, head_bytes: int, total_bytes: int | None) -> bool:
        """Whether the fault might strike this request. It may miss anyway, for example if the response is too short.

        Args:
            method: Empty without HTTP.
            path: As the client sent it, with the query. Empty without HTTP.
            head_bytes: Length of the request's head, with the blank line.
            total_bytes: Length of the whole request; None if its head does not give it.
        """
        if self.aim is not None and not self.aim(method, path):
            return False
        if self.fault is TcpFault.DUPLICATED:
            return bool(method) and (total_bytes or 0) <= DUPLICATE_BYTES_MAX
        first = (head_bytes if self.body_only else 0) + (self.at or 0)
        return self.side == "response" or total_bytes is None or first < total_bytes
