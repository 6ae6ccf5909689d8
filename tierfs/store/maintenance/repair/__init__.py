"""Repair: makes a store whole from what is sound, moves aside what cannot be saved, and says which files lost something."""

from tierfs.store.maintenance.repair.report import FileLoss, RepairItem, RepairReport
from tierfs.store.maintenance.repair.run import repair

__all__ = ["FileLoss", "RepairItem", "RepairReport", "repair"]
