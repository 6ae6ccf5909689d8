"""``tierfs ls``: list a directory."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_options, add_url_argument
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import align, format_time, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.store import Entry, find, list_directory
from tierfs.units import format_bytes

HELP = "list a directory"
EXAMPLES = """\
tierfs ls tierfs::s3://bucket/run
tierfs ls -l /data/checkpoints/run
tierfs ls -R s3://bucket/run --json"""


_OPTIONS = {
    "-l --long": "show type, size and time of change; `foreign` is a file that tierfs did not write",
    "-R --recursive": "list everything below, by relative path",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """List the entries. Manifests are read only for ``--long`` and ``--json``."""
    place = store_place(arguments.url)
    detail = arguments.long or arguments.json
    with Progress("ls"):
        with place.must_exist():
            entries = (find if arguments.recursive else list_directory)(place.store, place.path, detail=detail)
        if not entries:
            place.entry()
    document = {"url": place.url, "entries": [entry_document(place, entry) for entry in entries]} if detail else None
    if arguments.long:
        lines = align([_row(place, entry) for entry in entries], right=(1,), states=(0,))
    else:
        lines = [_shown(place, entry) for entry in entries]
    return print_result(arguments, document, *lines)


def _name(place: StorePlace, entry: Entry) -> str:
    """Return the path relative to the listed directory. A file that is itself listed has its own name."""
    return place.relative(entry.path) or place.name


def _shown(place: StorePlace, entry: Entry) -> str:
    return printable(_name(place, entry)) + ("/" if entry.is_directory else "")


def _modified_ns(entry: Entry) -> int | None:
    if entry.manifest is not None:
        return entry.manifest.modified_ns
    return entry.foreign.modified_ns if entry.foreign is not None else None


def _row(place: StorePlace, entry: Entry) -> tuple[str, str, str, str]:
    modified_ns = _modified_ns(entry)
    return (
        "directory" if entry.is_directory else "foreign" if entry.foreign is not None else "file",
        "-" if entry.is_directory else format_bytes(entry.length),
        "-" if modified_ns is None else format_time(modified_ns),
        _shown(place, entry),
    )


def entry_document(place: StorePlace, entry: Entry) -> dict[str, object]:
    modified_ns = _modified_ns(entry)
    manifest = None if entry.is_directory else entry.manifest
    return {
        "name": _name(place, entry),
        "type": "directory" if entry.is_directory else "file",
        "size": entry.length,
        "modified": None if modified_ns is None else format_time(modified_ns, precise=True),
        "digest": None if manifest is None else manifest.digest.hex(),
        "foreign": entry.foreign is not None,
    }
