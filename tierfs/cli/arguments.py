"""Arguments that several commands share, and checks of them. Cheap to import: ``--help`` and the flusher load it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level

PLACE = "tierfs:: URL, URL of the object tier, or local path"
"""Help text of an argument that `tierfs.cli.files.places.store_place` resolves."""
LEVELS = f"{{{','.join(level.label for level in Level if level)}}}"
"""The value of an option that is a level, for `add_options`."""


_OPTION = re.compile(r"((?:-\S+ ?)+)(?:([A-Z]+|\{.+\})(\.\.\.)?(?::(int|float))?(?:=(.+))?)?")


def add_options(parser: argparse._ActionsContainer, options: Mapping[str, str]) -> None:
    """Declare options, each by its usage and its help text.

    A usage is ``-r --recursive`` for a switch, and for an option with a value ``--rate N``, ``--rate N:float=3000``,
    ``--tier {ram,nvme}=nvme`` or, if it may be given several times, ``--keep RULE...``.
    """
    for usage, text in options.items():
        found = _OPTION.fullmatch(usage)
        assert found, usage
        names, value, many, kind, default = found.groups()
        how: dict[str, Any] = {"help": text}
        if value is None:
            how["action"] = "store_true"
        elif many:
            how |= {"metavar": value, "action": "append", "default": []}
        elif value.startswith("{"):
            how |= {"choices": value[1:-1].split(","), "default": default}
        else:
            convert = {None: str, "int": int, "float": float}[kind]
            how |= {"metavar": value, "type": convert, "default": None if default is None else convert(default)}
        parser.add_argument(*names.split(), **how)


def add_url_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Declare ``URL``, or ``URL...`` if ``several`` is set."""
    if several:
        parser.add_argument("urls", nargs="+", metavar="URL", help=f"{PLACE}; several may be given")
    else:
        parser.add_argument("url", metavar="URL", help=PLACE)


_OPTIONS = {
    "--tier {ram,nvme}=nvme": "the host's shared memory, or its disk (default: nvme)",
}


def add_tier_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tier``, which names a local tier."""
    add_options(parser, _OPTIONS)


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


def suggested(*words: str) -> str:
    """Return a command of tierfs for a message: quoted for a shell, in backticks."""
    return f"`{shlex.join(['tierfs', *words])}`"


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
