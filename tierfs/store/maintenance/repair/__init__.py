"""Repair a store from its sound copies, move unrepairable objects aside, and report files that lost data."""

from tierfs.store.maintenance.repair.report import FileLoss, RepairItem, RepairReport
from tierfs.store.maintenance.repair.run import repair

__all__ = ["FileLoss", "RepairItem", "RepairReport", "repair"]
