"""The files of a store for the page: listings, previews, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tierfs.cli.commands.listing import entry_document
from tierfs.cli.files.places import StorePlace
from tierfs.codec.layout.safetensors import read_table
from tierfs.errors import NotFoundError
from tierfs.store import Entry, level_of, list_directory, open_entry

TEXT_BYTES_MAX = 64 << 10
ENTRIES_MAX = 5000
PIECE_BYTES = 1 << 20


def file_document(place: StorePlace, entry: Entry) -> dict[str, Any]:
    """Return an entry as ``tierfs ls --json`` does, with its path and the level of a file."""
    try:
        level = None if entry.is_directory else level_of(place.store, entry.path).label
    except NotFoundError:  # deleted since the listing
        level = None
    return {**entry_document(place, entry), "path": entry.path, "level": level}


def directory(place: StorePlace) -> dict[str, Any]:
    """Return the output of ``tierfs ls --json`` with the level of each file, for at most `ENTRIES_MAX` entries."""
    with place.must_exist():
        entries = list_directory(place.store, place.path)
    listed = [file_document(place, entry) for entry in entries[:ENTRIES_MAX]]
    return {"url": place.url, "path": place.path, "entries": listed, "left_out": len(entries) - len(listed)}


def preview(place: StorePlace) -> dict[str, Any]:
    """Return the table of a safetensors file, or up to `TEXT_BYTES_MAX` bytes of text.

    Returns:
        ``kind``: ``safetensors`` with ``tensors``, ``text`` with ``text`` and ``is_whole``, or ``binary``.
    """
    reader = open_entry(place.store, place.entry(), exact=True)
    if place.path.endswith(".safetensors"):
        table, begin = read_table(reader.read_into, reader.length, place.url)
        tensors = [
            {"name": name, "dtype": each.dtype, "shape": each.shape, "at": begin + each.at, "size": each.length}
            for name, each in table.items()
        ]
        return {"path": place.path, "kind": "safetensors", "tensors": tensors}
    head = bytearray(min(reader.length, TEXT_BYTES_MAX))
    reader.read_into(0, memoryview(head))
    text, is_whole = head.decode(errors="replace"), len(head) == reader.length
    # A character may be cut at the end.
    is_text = "\0" not in text and "\ufffd" not in (text if is_whole else text[:-1])
    return {
        "path": place.path,
        **({"kind": "text", "text": text, "is_whole": is_whole} if is_text else {"kind": "binary"}),
    }


def pieces(place: StorePlace, entry: Entry) -> Iterator[bytes]:
    """Yield a file's bytes, verified. Raises `TierfsError` in the middle if bytes are damaged."""
    reader = open_entry(place.store, entry)
    for at in range(0, reader.length, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, reader.length - at))
        reader.read_into(at, memoryview(piece))
        yield bytes(piece)
