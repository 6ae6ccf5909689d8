"""torch.distributed.checkpoint on a store: writer, reader, planners. They need torch, and are imported at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierfs.dcp.installing import install, uninstall
    from tierfs.dcp.planner import TierLoadPlanner, TierSavePlanner
    from tierfs.dcp.reader import TierReader
    from tierfs.dcp.writer import TierWriter

__all__ = ["TierLoadPlanner", "TierReader", "TierSavePlanner", "TierWriter", "install", "uninstall"]

_HOMES = {
    "TierLoadPlanner": "tierfs.dcp.planner",
    "TierReader": "tierfs.dcp.reader",
    "TierSavePlanner": "tierfs.dcp.planner",
    "TierWriter": "tierfs.dcp.writer",
    "install": "tierfs.dcp.installing",
    "uninstall": "tierfs.dcp.installing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tierfs.dcp' has no attribute {name!r}")
