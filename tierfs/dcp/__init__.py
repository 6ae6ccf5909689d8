"""torch's distributed checkpoint on a store: writer, reader, planner. The package needs torch."""

from tierfs.dcp.planner import TierLoadPlanner
from tierfs.dcp.reader import TierReader
from tierfs.dcp.writer import TierWriter

__all__ = ["TierLoadPlanner", "TierReader", "TierWriter"]
