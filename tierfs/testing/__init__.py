"""Test tools: a conformance suite to subclass, and object tiers and connections that fail on demand.

Nothing in tierfs imports this package. Only the conformance suite needs pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierfs.testing.faults import Fault, FaultyObjects, PlannedFault, flip_bit, remove, swap, truncate
from tierfs.testing.tcpproxy import PlannedTcpFault, TcpFault, TcpFaultProxy

if TYPE_CHECKING:
    from tierfs.testing.objects import ObjectTierTests

__all__ = [
    "Fault",
    "FaultyObjects",
    "ObjectTierTests",
    "PlannedFault",
    "PlannedTcpFault",
    "TcpFault",
    "TcpFaultProxy",
    "flip_bit",
    "remove",
    "swap",
    "truncate",
]


def __getattr__(name: str) -> object:
    if name != "ObjectTierTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415 - only the conformance suite needs it

    pytest.register_assert_rewrite("tierfs.testing.objects")
    from tierfs.testing.objects import ObjectTierTests  # noqa: PLC0415 - needs pytest

    return ObjectTierTests
