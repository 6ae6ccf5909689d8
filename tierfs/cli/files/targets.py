"""Where the sources of ``cp`` and ``mv`` end up, by the rules of the commands that they are named after."""

from __future__ import annotations

import argparse

from tierfs.cli.files.places import Kind, Place
from tierfs.errors import AlreadyExistsError, InvalidInputError

__all__ = ["add_target_arguments", "clash", "final_place"]


def add_target_arguments(parser: argparse.ArgumentParser, *, described: str) -> None:
    """Declare ``SOURCE... TARGET`` and ``-T``."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=described)
    parser.add_argument(
        "target", metavar="TARGET", help="the new name; a directory that exists, or ends with /, to put them into"
    )
    parser.add_argument(
        "-T",
        "--no-target-directory",
        action="store_true",
        help="TARGET is the new name even if it is a directory: the content of SOURCE joins it, so the command can be repeated",
    )


def final_place(
    source: Place, kind: Kind, target: Place, target_kind: Kind | None, *, into: bool, alone: bool
) -> Place:
    """Where one source ends up.

    Args:
        source: What is copied or moved.
        kind: What it is.
        target: As given.
        target_kind: What is there.
        into: Whether the target is a directory to put things into: by its ``/`` or because it is there.
        alone: Whether this is the only source.

    Raises:
        InvalidInputError: A file cannot go there, or not several of them, or it is there already.
        AlreadyExistsError: A file is where a directory is to be.
    """
    if into and target_kind == "file":
        raise AlreadyExistsError(f"{target.url} is a file: leave the / at its end away to replace it", path=target.url)
    if not into and not alone:
        raise InvalidInputError(
            f"{target.url} is no directory, so several sources cannot go there: end it with / to make it one",
            path=target.url,
        )
    final = target.child(source.name) if into else target
    if source.is_same_as(final):
        raise InvalidInputError(f"{source.url} and {final.url} are the same: nothing was done", path=source.url)
    if kind == "directory" and source.holds(final):
        raise InvalidInputError(f"{source.url} cannot go into itself: choose another target", path=source.url)
    there = target_kind if final is target else final.kind()
    if there is not None and there != kind:
        raise clash(final.url, there)
    return final


def clash(url: str, there: Kind) -> AlreadyExistsError:
    """The error that a file and a directory are to have one name."""
    other = "directory" if there == "file" else "file"
    return AlreadyExistsError(f"{url} is a {there}, and a {other} cannot replace it: choose another name", path=url)
