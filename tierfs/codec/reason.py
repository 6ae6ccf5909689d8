"""Why a block has its codec: for a person, who finds it in the envelope."""

from __future__ import annotations

import enum

__all__ = ["Reason"]


class Reason(enum.IntEnum):
    """Why a block has its codec. The number is stored in the envelope, for a person."""

    NOT_STATED = 0
    DELTA = 1
    DELTA_TOO_LARGE = 2
    NO_BASE = 3
    LINK_IS_FASTER = 4
    DERIVED = 5
