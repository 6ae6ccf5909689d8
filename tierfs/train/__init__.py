"""Checkpoints of a training run: when to save, which ones to keep, how to resume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierfs.checkpoint.retention import Best, Every, Geometric, KeepPolicy, Latest, Within
    from tierfs.train.decider import outlive_signals
    from tierfs.train.handle import SaveHandle
    from tierfs.train.manager import Manager
    from tierfs.train.policies import Context, Deadline, Preemption, SavePolicy, YoungDaly
    from tierfs.train.proof import ResumeReport
    from tierfs.train.replay.policy import Replay
    from tierfs.train.restore import Restored
    from tierfs.train.state import TrainState

__all__ = [
    "Best",
    "Context",
    "Deadline",
    "Every",
    "Geometric",
    "KeepPolicy",
    "Latest",
    "Manager",
    "Preemption",
    "Replay",
    "Restored",
    "ResumeReport",
    "SaveHandle",
    "SavePolicy",
    "TrainState",
    "Within",
    "YoungDaly",
    "outlive_signals",
]

_RETENTION = "tierfs.checkpoint.retention"
_HOMES = {
    "Best": _RETENTION,
    "Context": "tierfs.train.policies",
    "Deadline": "tierfs.train.policies",
    "Every": _RETENTION,
    "Geometric": _RETENTION,
    "KeepPolicy": _RETENTION,
    "Latest": _RETENTION,
    "Manager": "tierfs.train.manager",
    "Preemption": "tierfs.train.policies",
    "Replay": "tierfs.train.replay.policy",
    "Restored": "tierfs.train.restore",
    "ResumeReport": "tierfs.train.proof",
    "SaveHandle": "tierfs.train.handle",
    "SavePolicy": "tierfs.train.policies",
    "TrainState": "tierfs.train.state",
    "Within": _RETENTION,
    "YoungDaly": "tierfs.train.policies",
    "outlive_signals": "tierfs.train.decider",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tierfs.train' has no attribute {name!r}")
