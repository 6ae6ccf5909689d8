"""Garbage collection: delete the chunks that two marks, a grace apart, did not reach from any record."""

from tierfs.store.maintenance.gc.report import GcOptions, GcReport, Tally
from tierfs.store.maintenance.gc.run import collect

__all__ = ["GcOptions", "GcReport", "Tally", "collect"]
