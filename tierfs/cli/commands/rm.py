"""``tierfs rm``: delete files and directories."""

from __future__ import annotations

import argparse
import contextlib
import threading

from tierfs.cli.arguments import add_url_argument, suggested
from tierfs.cli.files.parallel import run_in_parallel
from tierfs.cli.files.places import StorePlace
from tierfs.cli.files.selection import Selection, add_selection_arguments, places_of
from tierfs.cli.files.targets import refuse_foreign_files, remove_directories
from tierfs.cli.terminal.output import counted, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError
from tierfs.store import Entry, Store, delete, find

HELP = "delete files, and with -r directories; nothing is deleted before all arguments are checked"
EXAMPLES = """\
tierfs rm tierfs::s3://bucket/run/a.bin
tierfs rm -r s3://bucket/run/step_1000 s3://bucket/run/step_2000
tierfs rm -r 's3://bucket/run/step_1*' --exclude '*.json' --dry-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser, several=True)
    parser.add_argument("-r", "--recursive", action="store_true", help="delete directories, with everything in them")
    add_selection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    chosen = Selection(arguments.include, arguments.exclude)
    files: dict[tuple[str, str], tuple[Store, int]] = {}
    directories: list[tuple[Store, list[str]]] = []
    for place in places_of(arguments.urls):
        try:
            entry = place.entry()
        except CorruptionError:
            # The record cannot be read, but it can be deleted.
            files[place.store.url, place.path] = place.store, 0
            continue
        if entry.is_directory and not arguments.recursive:
            raise InvalidInputError(f"{place.url} is a directory: add -r to delete it", path=place.url)
        below = find(place.store, place.path, detail=arguments.dry_run) if arguments.recursive else []

        def is_doomed(one: Entry, place: StorePlace = place) -> bool:
            return not one.is_directory and chosen.takes(place.relative(one.path) or place.name)

        doomed = list(filter(is_doomed, (entry, *below)))
        refuse_foreign_files(place.store, doomed)
        # Without a dry run, the lengths are known when the files are deleted.
        files.update({(place.store.url, one.path): (place.store, one.length) for one in doomed})
        # A file and a directory may have the same name. Where files stay, so do the directories.
        if chosen.is_all and (entry.is_directory or any(one.path != place.path for one in below)):
            directories.append((place.store, [place.path, *(one.path for one in below if one.is_directory)]))
    if arguments.dry_run:
        return _print(arguments, files)

    def delete_one(name: tuple[str, str], _stop: threading.Event) -> None:
        store, _ = files[name]
        # Another process may have deleted the file already.
        with contextlib.suppress(NotFoundError):
            files[name] = store, delete(store, name[1])

    with Progress("rm") as progress:
        run_in_parallel(delete_one, list(files), progress)
        for store, paths in directories:
            remove_directories(store, [path for path in paths if path])
    return _print(arguments, files)


def _print(arguments: argparse.Namespace, files: dict[tuple[str, str], tuple[Store, int]]) -> int:
    size, dry_run = sum(size for _, size in files.values()), arguments.dry_run
    paths = [store.where(path) for (_, path), (store, _) in files.items()] if dry_run else []
    document = {"files": len(files), "bytes": size, "dry_run": dry_run, "would_delete": paths}
    commands = ", ".join(suggested("gc", url) for url in {url: None for url, _ in files})
    frees = "" if dry_run or not files else f"; {commands} frees what nothing else needs"
    total = f"{'would delete' if dry_run else 'deleted'} {counted(len(files), size)}{frees}"
    return print_result(arguments, document, *(f"would delete {printable(path)}" for path in paths), total)
