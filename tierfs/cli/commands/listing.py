"""``tierfs ls``, ``stat``, ``cat`` and ``du``: look at the files of a store."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tierfs.cli.arguments import URL, command, suggested, without_json
from tierfs.cli.files.places import StorePlace, requests_of, store_place
from tierfs.cli.files.transfer import fill_stream, read_pieces
from tierfs.cli.terminal.output import align, format_time, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError
from tierfs.format.keys import chunk_key
from tierfs.format.manifest import Row
from tierfs.store import Entry, find, list_directory, open_entry, usage
from tierfs.store.read.reader import expand_rows
from tierfs.units import format_bytes


@command(
    "ls",
    "list a directory",
    """
    tierfs ls tierfs::s3://bucket/run
    tierfs ls -l /data/checkpoints/run
    tierfs ls -R s3://bucket/run --json
    """,
    URL,
    {
        "-l --long": "show type, size and time of change; `foreign` is a file that tierfs did not write",
        "-R --recursive": "list everything below, by relative path",
    },
)
def run_ls(arguments: argparse.Namespace) -> int:
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
        lines = [_shown_name(place, entry) for entry in entries]
    return print_result(arguments, document, *lines)


def _relative(place: StorePlace, entry: Entry) -> str:
    """Return the path relative to the listed directory. A file that is itself listed has its own name."""
    return place.relative(entry.path) or place.name


def _shown_name(place: StorePlace, entry: Entry) -> str:
    return printable(_relative(place, entry)) + ("/" if entry.is_directory else "")


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
        _shown_name(place, entry),
    )


def entry_document(place: StorePlace, entry: Entry) -> dict[str, object]:
    modified_ns = _modified_ns(entry)
    manifest = None if entry.is_directory else entry.manifest
    return {
        "name": _relative(place, entry),
        "type": "directory" if entry.is_directory else "file",
        "size": entry.length,
        "modified": None if modified_ns is None else format_time(modified_ns, precise=True),
        "digest": None if manifest is None else manifest.digest.hex(),
        "foreign": entry.foreign is not None,
    }


@command(
    "stat",
    "show size, times, digest, chunks and metadata of a file or directory",
    """
    tierfs stat tierfs::s3://bucket/run/model.safetensors
    tierfs stat --chunks /data/checkpoints/run/model.safetensors
    tierfs stat tierfs://NAME/run --json
    """,
    URL,
    {
        "--chunks": "also list the chunks: offset and length in the file, stored length, key of the object",
    },
)
def run_stat(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    entry = place.entry()
    rows: Sequence[Row] = ()
    if entry.manifest is not None and not entry.is_directory:
        rows = expand_rows(place.store, entry.manifest, place.path)
    document = _stat_document(place, entry, rows)
    lines = align([(name.replace("_", " "), _shown_value(name, value)) for name, value in document.items()])
    if arguments.chunks:
        document["chunk_table"] = _chunk_table(rows)
        head = ("offset", "length", "stored", "key")
        cells = [tuple(str(value) for value in chunk.values()) for chunk in _chunk_table(rows)]
        lines += ["", *align([head, *cells], right=(0, 1, 2), has_head=True)] if cells else []
    return print_result(arguments, document, *lines)


def _stat_document(place: StorePlace, entry: Entry, rows: Sequence[Row]) -> dict[str, object]:
    document: dict[str, object] = {
        "url": place.url,
        "store": place.store.url,
        "path": place.path,
        "type": "directory" if entry.is_directory else "file",
    }
    if not entry.is_directory:
        document["size"] = entry.length
    if entry.manifest is not None:
        document |= {
            "created": format_time(entry.manifest.created_ns, precise=True),
            "modified": format_time(entry.manifest.modified_ns, precise=True),
        }
        if not entry.is_directory:
            document |= {
                "digest": entry.manifest.digest.hex(),
                "digest_kind": entry.manifest.digest_kind.label,
                "chunks": len(rows),
                "chunk_bytes": sum({row.name: row.stored_length for row in rows}.values()),
                "inline": entry.manifest.inline is not None,
                "metadata": dict(entry.manifest.metadata),
            }
    if entry.foreign is not None:
        document |= {
            "modified": format_time(entry.foreign.modified_ns, precise=True),
            "version": entry.foreign.version,
        }
    if not entry.is_directory:
        document["foreign"] = entry.foreign is not None
    return document


def _chunk_table(rows: Sequence[Row]) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    offset = 0
    for row in rows:
        key = chunk_key(row.name)
        table.append({"offset": offset, "length": row.raw_length, "stored_length": row.stored_length, "key": key})
        offset += row.raw_length
    return table


def _shown_value(name: str, value: object) -> str:
    if name in ("size", "chunk_bytes") and isinstance(value, int):
        return f"{format_bytes(value)} ({value} bytes)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True) if value else "-"
    return printable(str(value)) or "-"


@command(
    "cat",
    "write the bytes of a file, or a range of them, to stdout",
    """
    tierfs cat tierfs::s3://bucket/run/config.json
    tierfs cat --offset 8 --length 4KiB /data/checkpoints/run/model.safetensors | xxd
    """,
    URL,
    {
        "--offset N:size=0": "first byte, counted from 0 (default: 0)",
        "--length N:size": "number of bytes at most (default: to the end)",
    },
    without_json,
)
def run_cat(arguments: argparse.Namespace) -> int:
    """Write the bytes. Each is verified before it is written."""
    place = store_place(arguments.url)
    entry = place.entry()
    if entry.is_directory:
        raise InvalidInputError(f"{place.url} is a directory: {suggested('ls', place.url)} lists it", path=place.url)
    reader = open_entry(place.store, entry)
    start = min(arguments.offset, reader.length)
    stop = reader.length if arguments.length is None else min(start + arguments.length, reader.length)
    fill_stream(sys.stdout.buffer, read_pieces(reader, start, stop))
    return 0


@command(
    "du",
    "show logical, stored and shared bytes, and the bytes that deleting frees",
    """
    tierfs du tierfs::s3://bucket/run
    tierfs du /data/checkpoints --json
    """,
    URL,
)
def run_du(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    with place.must_exist(), Progress("du"):
        counts = {name: count for name, count in asdict(usage(place.store, place.path)).items() if count is not None}
    rows = [
        (name.replace("_", " "), format_bytes(count) if name.endswith("bytes") else str(count), _exactly(name, count))
        for name, count in counts.items()
    ]
    document = {**counts, "requests": requests_of(place.store)}
    return print_result(arguments, document, *align(rows, right=(1,)))


def _exactly(name: str, count: int) -> str:
    return f"({count})" if name.endswith("bytes") and count >= 1024 else ""  # noqa: PLR2004 - a smaller count is shown exactly
