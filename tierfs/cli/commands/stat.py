"""``tierfs stat``: show everything known about one path."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tierfs.cli.arguments import add_options, add_url_argument
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import align, format_time, print_result, printable
from tierfs.format.keys import chunk_key
from tierfs.format.manifest import Manifest, Row
from tierfs.store import Entry
from tierfs.store.read.reader import expand_rows
from tierfs.units import format_bytes

HELP = "show size, times, digest, chunks and metadata of a file or directory"
EXAMPLES = """\
tierfs stat tierfs::s3://bucket/run/model.safetensors
tierfs stat --chunks /data/checkpoints/run/model.safetensors
tierfs stat tierfs://NAME/run --json"""

_OPTIONS = {"--chunks": "also list the chunks: offset and length in the file, stored length, key of the object"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    entry = place.entry()
    rows: Sequence[Row] = ()
    if entry.manifest is not None and not entry.is_directory:
        rows = expand_rows(place.store, entry.manifest, place.path)
    document = _document(place, entry, rows)
    lines = align([(name.replace("_", " "), _shown(name, value)) for name, value in document.items()])
    if arguments.chunks:
        document["chunk_table"] = _table(rows)
        head = ("offset", "length", "stored", "key")
        cells = [tuple(str(value) for value in chunk.values()) for chunk in _table(rows)]
        lines += ["", *align([head, *cells], right=(0, 1, 2), has_head=True)] if cells else []
    return print_result(arguments, document, *lines)


def _document(place: StorePlace, entry: Entry, rows: Sequence[Row]) -> dict[str, object]:
    document: dict[str, object] = {
        "url": place.url,
        "store": place.store.url,
        "path": place.path,
        "type": "directory" if entry.is_directory else "file",
    }
    if not entry.is_directory:
        document["size"] = entry.length
    if entry.manifest is not None:
        document |= _times(entry.manifest)
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


def _times(manifest: Manifest) -> dict[str, object]:
    return {
        "created": format_time(manifest.created_ns, precise=True),
        "modified": format_time(manifest.modified_ns, precise=True),
    }


def _table(rows: Sequence[Row]) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    offset = 0
    for row in rows:
        key = chunk_key(row.name)
        table.append({"offset": offset, "length": row.raw_length, "stored_length": row.stored_length, "key": key})
        offset += row.raw_length
    return table


def _shown(name: str, value: object) -> str:
    if name in ("size", "chunk_bytes") and isinstance(value, int):
        return f"{format_bytes(value)} ({value} bytes)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True) if value else "-"
    return printable(str(value)) or "-"
