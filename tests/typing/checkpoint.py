"""Typed uses of the writer and the reader: mypy checks this file, and nothing runs it."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp

from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter, install, uninstall


def save(state: dict[str, Any], step: int) -> dict[str, Any]:
    """Save a state and wait until it is on disk."""
    writer = TierWriter("tierfs::s3://bucket/run", ack="staged", stage="auto")
    staged = writer.stage(state)
    dcp.save(staged, checkpoint_id=f"tierfs::s3://bucket/run/{step}", storage_writer=writer)
    writer.wait("local", timeout=60)
    return writer.status()


def load(state: dict[str, Any], step: int) -> None:
    """Load a state in place."""
    url = f"tierfs::s3://bucket/run/{step}"
    dcp.load(state, checkpoint_id=url, storage_reader=TierReader(url), planner=TierLoadPlanner())


install()
uninstall()
