"""``tierfs checkpoint commit``: publish a save of several hosts when all its parts are in the object tier."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import require_seconds
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import print_json, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import NotFoundError
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.format.keys import inside
from tierfs.store import stat
from tierfs.store.commit import Commits


def commit(arguments: argparse.Namespace) -> int:
    """Publish the checkpoint and print its save id. Raise if parts are still missing at the end of the timeout."""
    timeout_s = 0.0 if arguments.timeout is None else arguments.timeout
    require_seconds("--timeout", timeout_s)
    place = store_place(arguments.url)
    with Progress("commit"):
        Commits(place.store).wait(place.path, timeout_s)
    root = inside(place.path, ROOT)
    try:
        manifest = stat(place.store, root).manifest
    except NotFoundError as error:
        raise NotFoundError(
            f"{place.url} is not a checkpoint, and no save to it is announced: `tierfs checkpoint ls` lists the checkpoints",
            path=place.path,
        ) from error
    mark = None if manifest is None else SaveMark.of(manifest.metadata)
    if arguments.json:
        print_json({"url": place.url, "save_id": mark.save_id if mark is not None else None})
    else:
        print(f"{printable(place.url)} is complete" + (f": save {mark.save_id}" if mark is not None else ""))
    return 0
