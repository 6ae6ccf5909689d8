"""``tierfs rm``: delete files and directories."""

from __future__ import annotations

import argparse
import contextlib
import threading

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.parallel import run_in_parallel
from tierfs.cli.files.places import store_place
from tierfs.cli.files.targets import refuse_foreign_files, remove_directories
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError
from tierfs.store import Store, delete, find

HELP = "delete files, and with -r directories; nothing is deleted before all arguments are checked"
EXAMPLES = """\
tierfs rm tierfs::s3://bucket/run/a.bin
tierfs rm -r s3://bucket/run/step_1000 s3://bucket/run/step_2000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser, several=True)
    parser.add_argument("-r", "--recursive", action="store_true", help="delete directories, with everything in them")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    files: dict[tuple[str, str], Store] = {}
    directories: list[tuple[Store, list[str]]] = []
    for text in arguments.urls:
        place = store_place(text)
        try:
            entry = place.entry()
        except CorruptionError:
            # The record cannot be read, but it can be deleted.
            files[place.store.url, place.path] = place.store
            continue
        if entry.is_directory and not arguments.recursive:
            raise InvalidInputError(f"{place.url} is a directory: add -r to delete it", path=place.url)
        below = find(place.store, place.path, detail=False) if arguments.recursive else []
        doomed = [one for one in (entry, *below) if not one.is_directory]
        refuse_foreign_files(place.store, doomed)
        files.update({(place.store.url, one.path): place.store for one in doomed})
        # A file and a directory may have the same name.
        if entry.is_directory or any(one.path != place.path for one in below):
            directories.append((place.store, [place.path, *(one.path for one in below if one.is_directory)]))

    def delete_one(item: tuple[tuple[str, str], Store], _stop: threading.Event) -> None:
        (_, path), store = item
        # Another process may have deleted the file already.
        with contextlib.suppress(NotFoundError):
            delete(store, path)

    with Progress("rm") as progress:
        run_in_parallel(delete_one, files.items(), progress)
        for store, paths in directories:
            remove_directories(store, [path for path in paths if path])
    if arguments.json:
        print_json({"files": len(files)})
    return 0
