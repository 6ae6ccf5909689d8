"""The satellites that the core loads when they are asked for: parts that stand on the core.

No other file of the core names a satellite. Without its line here, a satellite's folder and tests can be deleted.
"""

from __future__ import annotations

COMMAND_LINE = "tierfs.cli"
"""Runs as a program: the flusher's process."""
MOUNT = "tierfs.mount"
"""A package that can be called."""
REPLICATION = "tierfs.peers.replication"
"""Has ``replication_of(options, free_bytes)``, which returns a `tierfs.flusher.engine.Replication`."""
