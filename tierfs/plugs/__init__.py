"""Plugs for training frameworks: one module a framework, imported only with it.

Each module saves through `tierfs.train` or `tierfs.dcp` with the hooks that its framework offers. This package imports
none of them.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from tierfs.errors import InvalidInputError

logger = logging.getLogger("tierfs.plugs")


def is_ours(path: Any) -> bool:
    return str(os.fspath(path)).startswith("tierfs:")


def checked_url(path: Any) -> str:
    """Return a tierfs URL as text. Raise `InvalidInputError` if it is something else."""
    if not is_ours(path):
        raise InvalidInputError(f"checkpoints of this plug go to tierfs URLs, not to {str(path)!r}: give 'tierfs::...'")
    return str(os.fspath(path))


def announce(what: str, url: str, ack: str | None) -> None:
    """Say once, at the start, where a plug saves, and at which level."""
    logger.warning("tierfs: %s go to %s; a save is done at %s", what, url, ack or "the configured level")
