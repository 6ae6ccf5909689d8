"""Typed uses of the filesystem: mypy checks this file, and nothing runs it."""

from __future__ import annotations

from pathlib import Path

import tierfs
from tierfs.errors import CorruptionError, TierfsError

tierfs.init("file:///data/checkpoints")


def content(fs: tierfs.TierFileSystem, path: str) -> bytes:
    """Read a file, or end with the kind of the error."""
    try:
        found: bytes = fs.cat_file(path)
    except CorruptionError as error:
        kind: str = error.kind
        raise SystemExit(kind) from error
    return found


def durable(fs: tierfs.TierFileSystem, path: str, source: Path) -> str:
    """Write a file and wait until the object tier has it."""
    fs.pipe_file(path, source.read_bytes())
    try:
        fs.wait(path, "object", timeout=60)
    except (TimeoutError, TierfsError):
        return fs.ack(path)
    fs.prefetch(path, tier="ram")
    fs.evict(path, tier="nvme")
    return fs.ack(path)
