"""Arguments that several commands share, and checks of them. Cheap to import: ``--help`` and the flusher load it."""

from __future__ import annotations

import argparse
import importlib.util
import math

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level

PLACE = "tierfs:: URL, URL of the object tier, or local path"
"""Help text of an argument that `tierfs.cli.files.places.store_place` resolves."""
LEVELS = [level.label for level in Level if level]
"""Labels of all levels but ``none``."""


def add_url_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Declare ``URL``, or ``URL...`` if ``several`` is set."""
    if several:
        parser.add_argument("urls", nargs="+", metavar="URL", help=f"{PLACE}; several may be given")
    else:
        parser.add_argument("url", metavar="URL", help=PLACE)


def add_tier_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tier``, which names a local tier."""
    parser.add_argument(
        "--tier",
        choices=["ram", "nvme"],
        default="nvme",
        help="the host's shared memory, or its disk (default: nvme)",
    )


def add_replicas_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--from``, which collects URLs in the list ``arguments.replicas``."""
    parser.add_argument(
        "--from",
        dest="replicas",
        action="append",
        default=[],
        metavar="URL",
        help="a copy of the store, or another store that may hold the same content, to heal from; may be given several times",
    )


def require_url(text: str) -> None:
    """Check that an argument is not empty, as an unset shell variable makes it.

    Raises:
        InvalidInputError: The argument is empty.
    """
    if not text:
        raise InvalidInputError("an argument is empty: give a URL or a path")


def require_seconds(option: str, seconds: float, *, over_0: bool = False, may_be_infinite: bool = False) -> None:
    """Check a duration.

    Args:
        option: The option's name, with its dashes.
        seconds: The duration.
        over_0: Whether 0 is refused.
        may_be_infinite: Whether ``inf`` is accepted.

    Raises:
        InvalidInputError: The duration is out of range.
    """
    is_enough = seconds > 0 if over_0 else seconds >= 0
    if not is_enough or (math.isinf(seconds) and not may_be_infinite):
        raise InvalidInputError(f"{option} {seconds:g}: give a number of seconds {'over 0' if over_0 else 'from 0 on'}")


def require_torch(task: str) -> None:
    """Check that torch is installed, without importing it.

    Args:
        task: A clause that says what needs torch, like ``checkpoints are read``.

    Raises:
        InvalidInputError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInputError(f"{task} with torch, which is not installed: pip install 'tierfs[torch]'")
