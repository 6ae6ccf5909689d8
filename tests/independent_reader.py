"""A reader of tierfs stores, made from ``docs/reference/FORMAT.md`` alone: it shares no line of code with the package.

It reads a store in a local directory and checks all that the specification lets a reader check.
``python independent_reader.py ROOT`` reads and verifies every file, and lists them with sizes and content digests.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import zstandard

MAGIC, BLOCK, CHUNK, MANIFEST, TEXT = b"\x89TIERFS\n", 1 << 20, 16 << 20, 16 << 20, 1 << 16
KIND_CHUNK, KIND_FILE, KIND_TOMBSTONE, KIND_DIRECTORY, KIND_CONDEMNED, KIND_LEASE = KINDS = (1, 2, 3, 4, 6, 7)
INLINE, INDIRECT = 1, 2
DIGESTS = {"xxh3-128": (1, 16), "blake3": (2, 32)}  # name: number, size
COMPONENT = re.compile(r"(?:[A-Za-z0-9_.=+,@-]|![0-9a-f]{2})+")
RANGES = {"format": (1, 1), "created_ns": (-(1 << 63), (1 << 63) - 1), "block_bytes": (BLOCK, BLOCK),
          "chunk_bytes": (CHUNK, CHUNK), "inline_bytes": (0, TEXT), "chain_max": (0, 32), "lease_s": (1, 3600),
          "grace_s": (1, 31536000)}  # fmt: skip
PROMISES = ("conditional_create", "conditional_update", "list_after_write", "atomic_put", "host_local")


class ReaderError(Exception):
    """An object breaks the specification; ``kind`` is ``corruption`` or ``format``, as in its table of errors."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class ChunkName(NamedTuple):
    """What names a chunk object."""

    digest: bytes
    generation: int
    recipe: bytes

    @property
    def key(self) -> str:
        """Its key below the store's root."""
        text, recipe = self.digest.hex(), f"-{self.recipe.hex()}" if any(self.recipe) else ""
        return f".tierfs/chunks/{text[:2]}/{text}.{self.generation}{recipe}"


class Row(NamedTuple):
    """One chunk of a file, or of the row table of a file."""

    name: ChunkName
    raw_length: int
    stored_length: int
    bases: tuple[ChunkName, ...]


class Tombstone(NamedTuple):
    """The record of a deleted path."""

    write_id: bytes
    deleted_ns: int
    deleted_version: int


class Manifest(NamedTuple):
    """The record of a live path; ``rows`` as in the record, so those of an INDIRECT one are the chunks of its table."""

    flags: int
    write_id: bytes
    length: int
    created_ns: int
    modified_ns: int
    element_type: int
    previous: bytes
    metadata: dict[str, Any]
    content_digest: bytes
    inline: bytes
    rows: tuple[Row, ...]


class Lease(NamedTuple):
    """What a writer holds while it refers to chunks."""

    holder: bytes
    sequence: int
    renewed_ns: int
    duration_s: int
    host: str


class Condemned(NamedTuple):
    """The chunks that a mark found unreached."""

    epoch: int
    published_ns: int
    names: tuple[ChunkName, ...]


def encode_path(path: str) -> str:
    """The key of a path below ``.tierfs/tree/``, without the ``!`` of its record; ValueError if it is no path."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] == ".tierfs":
        raise ValueError(f"no path: {path!r}")
    encoded = ["".join(chr(b) if COMPONENT.fullmatch(chr(b)) else f"!{b:02x}" for b in p.encode()) for p in parts]
    if max(map(len, encoded)) > 250 or sum(map(len, encoded)) + len(encoded) > 800:
        raise ValueError(f"the path is too long: {path!r}")
    return "/".join(encoded)


def decode_key(key: str) -> str | None:
    """The path of a record's key below ``.tierfs/tree/``, a marker's with a ``/`` behind it; None if it is none."""
    slash = "/" if key.endswith("/!") else ""
    encoded = key.removesuffix(f"{slash}!")
    if encoded == key or not all(COMPONENT.fullmatch(part) for part in encoded.split("/")):
        return None
    try:
        path = re.sub(rb"!(..)", lambda match: bytes([int(match[1], 16)]), encoded.encode()).decode()
        return path + slash if encode_path(path) == encoded else None
    except ValueError:
        return None


def _sound(condition: bool, text: str) -> None:
    if not condition:
        raise ReaderError("corruption", text)


def _known(condition: bool, text: str) -> None:
    if not condition:
        raise ReaderError("format", text)


def _checksum(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _json(data: bytes, kind: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode(), parse_constant=lambda name: _known(False, f"{what}: {name}"))
    except (ValueError, RecursionError) as error:
        raise ReaderError(kind, f"{what}: {error}") from error
    if not isinstance(value, dict):
        raise ReaderError(kind, f"{what}: no JSON object")
    return value


class _Fields:
    """The fields of an object, in order. Those that go beyond its end are an error."""

    def __init__(self, data: bytes, what: str, at: int = 0) -> None:
        self.data, self.what, self.at = data, what, at

    def take(self, size: int) -> bytes:
        _known(size <= len(self.data) - self.at, f"{self.what}: fields beyond the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def number(self, form: str, low: int, high: int, name: str) -> int:
        value: int = self.unpack(form)[0]
        _known(low <= value <= high, f"{self.what}: {name} is {value}")
        return value

    def reserved(self, size: int) -> None:
        _known(not any(self.take(size)), f"{self.what}: reserved bytes that are not zero")

    def end(self) -> None:
        _known(self.at == len(self.data), f"{self.what}: bytes after the last field")


class StoreReader:
    """A store in a local directory.

    Every method raises ReaderError if an object it needs breaks the specification.

    Args:
        root: The directory.
        blake3: Gives the 32-byte BLAKE3 digest of some bytes; needed for a store with such digests only.

    Attributes:
        descriptor: The store's descriptor, checked.

    Raises:
        FileNotFoundError: There is no store.
    """

    def __init__(self, root: str | os.PathLike[str], blake3: Callable[[bytes], bytes] | None = None) -> None:
        self._root = Path(root)
        self.descriptor = self._read_descriptor()
        functions = {"xxh3-128": _checksum, "blake3": blake3}
        digest = functions.get(self.descriptor["digest"])
        if digest is None:
            raise ReaderError("format", f"descriptor: digest {self.descriptor['digest']}")
        self._digest, (self._number, self._size) = digest, DIGESTS[self.descriptor["digest"]]

    def records(self) -> dict[str, Manifest | Tombstone]:
        """Every record by its path, that of a directory's marker with a ``/`` behind it; contents are not read."""
        paths = (decode_key(key.removeprefix(".tierfs/tree/")) for key in self._keys(".tierfs/tree"))
        return {path: self.record(path) for path in sorted(path for path in paths if path is not None)}

    def files(self) -> list[str]:
        """The paths of all files."""
        return [path for path, item in self.records().items() if isinstance(item, Manifest) and path[-1] != "/"]

    def directories(self) -> list[str]:
        """The paths of all directories with a live marker."""
        return [path[:-1] for path, item in self.records().items() if isinstance(item, Manifest) and path[-1] == "/"]

    def tombstones(self) -> list[str]:
        """The paths of all tombstones, that of a directory's marker with a ``/`` behind it."""
        return [path for path, item in self.records().items() if isinstance(item, Tombstone)]

    def leases(self) -> list[Lease]:
        """All leases, whether they have run out or not."""
        return [self._lease(key) for key in self._keys(".tierfs/leases")]

    def condemned(self) -> list[Condemned]:
        """All condemned lists in the order of their epochs."""
        return [self._condemned(key) for key in self._keys(".tierfs/gc")]

    def record(self, path: str) -> Manifest | Tombstone:
        """The record of a path; with a ``/`` behind it, of the directory's marker. FileNotFoundError if it has none."""
        name = path.removesuffix("/")
        kind = KIND_FILE if name == path else KIND_DIRECTORY
        key = f".tierfs/tree/{encode_path(name)}{path[len(name) :]}!"
        kind, flags, fields = self._open(key, (kind, KIND_TOMBSTONE), MANIFEST)
        write_id, path_check = fields.unpack("16s16s")
        _sound(path_check == _checksum(path.encode()), f"{key}: the record of another path")
        if kind != KIND_TOMBSTONE:
            return self._manifest(kind, flags, write_id, fields)
        _known(flags == 0, f"{key}: reserved bytes that are not zero")
        tombstone = Tombstone(write_id, *fields.unpack("qQ"))
        fields.end()
        return tombstone

    def manifest(self, path: str) -> Manifest:
        """The record of a live path, see ``record``. FileNotFoundError if there is none, or a tombstone."""
        record = self.record(path)
        if isinstance(record, Tombstone):
            raise FileNotFoundError(path)
        return record

    def rows(self, manifest: Manifest) -> tuple[Row, ...]:
        """The chunks of a file, those of an INDIRECT one from its table; length and content digest are checked."""
        rows = manifest.rows
        if manifest.flags & INDIRECT:
            table, found = _Fields(b"".join(map(self._chunk, rows)), "row table"), []
            while table.at < len(table.data):
                found.append(self._row(table))
            rows = tuple(found)
        digests = [row.name.digest for row in rows]
        if manifest.inline:
            digests = [self._digest(struct.pack("<Q", manifest.length) + self._digest(manifest.inline))]
        total = len(manifest.inline) + sum(row.raw_length for row in rows)
        _known(total == manifest.length, f"{total} bytes of content for a length of {manifest.length}")
        digest = self._digest(struct.pack("<Q", manifest.length) + b"".join(digests))
        _sound(digest == manifest.content_digest, "the content digest does not follow from the content")
        return rows

    def read(self, path: str) -> bytes:
        """The content of a file, every byte verified. FileNotFoundError if there is no such file."""
        manifest = self.manifest(path)
        return b"".join(map(self._chunk, self.rows(manifest))) or manifest.inline

    def chunk_names(self, path: str) -> list[ChunkName]:
        """Every chunk object that is needed to read a file: of its table, of its content, and their bases."""
        manifest = self.manifest(path)
        rows = dict.fromkeys(manifest.rows + self.rows(manifest))
        return list(dict.fromkeys(name for row in rows for name in (row.name, *row.bases)))

    def _keys(self, below: str) -> list[str]:
        found = (Path(at, name) for at, _, names in os.walk(self._root / below) for name in names)
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def _get(self, key: str, limit: int) -> bytes:
        with open(self._root / key, "rb") as file:
            _known(os.fstat(file.fileno()).st_size <= limit, f"{key}: over {limit} bytes")
            return file.read()

    def _read_descriptor(self) -> dict[str, Any]:
        value = _json(self._get(".tierfs/store.json", TEXT), "corruption", "descriptor")
        _sound(value.get("magic") == "tierfs-store", "descriptor: wrong magic")
        _known(value.get("format") == 1, f"descriptor: format {value.get('format')}, this reader knows 1")
        rest = {name: item for name, item in value.items() if name != "checksum"}
        checksum = _checksum(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
        _sound(value.get("checksum") == checksum.hex(), "descriptor: wrong checksum")
        for name, (low, high) in RANGES.items():
            _known(type(value.get(name)) is int and low <= value[name] <= high, f"descriptor: {name}")
        uuid, endpoint = value.get("uuid"), value.get("endpoint")
        _known(isinstance(uuid, str) and re.fullmatch("[0-9a-f]{32}", uuid) is not None, "descriptor: uuid")
        _known(isinstance(value.get("single_writer"), bool), "descriptor: single_writer")
        _known(isinstance(value.get("digest"), str), "descriptor: digest")
        promises = [endpoint.get(name) for name in PROMISES] if isinstance(endpoint, dict) else [None]
        _known(all(isinstance(promise, bool) for promise in promises), "descriptor: endpoint")
        return value

    def _open(self, key: str, kinds: tuple[int, ...], limit: int) -> tuple[int, int, _Fields]:
        """The kind of an object, the word in its header, and the fields behind; header and checksum are checked."""
        data = self._get(key, limit)
        _sound(len(data) >= 32 and data[:8] == MAGIC, f"{key}: too short, or wrong magic")
        version, kind, word = struct.unpack_from("<HHI", data, 8)
        _known(version == 1, f"{key}: format version {version}, this reader knows 1")
        _known(kind in KINDS, f"{key}: unknown kind {kind}")
        _sound(kind in kinds, f"{key}: an object of kind {kind}")
        end = (word if kind == KIND_CHUNK else len(data)) - 16
        checksum = _checksum(memoryview(data)[: max(end, 0)])
        _sound(data[end : end + 16] == checksum, f"{key}: too short, or wrong checksum")
        if kind in (KIND_FILE, KIND_TOMBSTONE, KIND_DIRECTORY):
            _known((len(data) > 80, len(data) == 80)[kind == KIND_TOMBSTONE], f"{key}: {len(data)} bytes")
        return kind, word, _Fields(data if kind == KIND_CHUNK else data[:end], key, at=16)

    def _name(self, fields: _Fields) -> ChunkName:
        return ChunkName(fields.take(self._size), *fields.unpack("I8s"))

    def _row(self, fields: _Fields) -> Row:
        digest = fields.take(self._size)
        raw_length = fields.number("I", 1, CHUNK, "the raw length of a row")
        stored_length, generation, recipe = fields.unpack("II8s")
        bases = fields.number("H", 0, 8, "the number of bases of a row")
        fields.reserved(2)
        _known(any(recipe) == (bases > 0), f"{fields.what}: a row with {bases} bases and the recipe {recipe.hex()}")
        name = ChunkName(digest, generation, recipe)
        return Row(name, raw_length, stored_length, tuple(self._name(fields) for _ in range(bases)))

    def _manifest(self, kind: int, flags: int, write_id: bytes, fields: _Fields) -> Manifest:
        _known(flags in (0, INLINE, INDIRECT), f"{fields.what}: flags {flags}")
        length = fields.number("Q", 0, (1 << 63) - 1, "the length")
        created, modified = fields.unpack("qq")
        fields.number("B", self._number, self._number, "the kind of digests")
        element_type = fields.number("B", 0, 255, "the element type")
        previous_length = fields.number("H", 0, 256, "the length of the previous version")
        metadata_length = fields.number("I", 0, TEXT, "the length of the metadata")
        inline_length = fields.number("I", 0, TEXT, "the length of the inline content")
        row_count = fields.unpack("I")[0]
        digest, previous, metadata = (fields.take(n) for n in (self._size, previous_length, metadata_length))
        inline = fields.take(inline_length)
        rows = tuple(self._row(fields) for _ in range(row_count))
        fields.end()
        _known(len(inline) == (length if flags & INLINE else 0), f"{fields.what}: {len(inline)} bytes inline")
        _known(not (flags & INLINE and rows), f"{fields.what}: rows beside inline content")
        _known(kind == KIND_FILE or (flags, length) == (INLINE, 0), f"{fields.what}: a directory with content")
        values = _json(metadata, "format", f"{fields.what}: metadata") if metadata else {}
        return Manifest(
            flags, write_id, length, created, modified, element_type, previous, values, digest, inline, rows
        )

    def _chunk(self, row: Row) -> bytes:
        try:
            _, envelope, fields = self._open(row.name.key, (KIND_CHUNK,), 2 * CHUNK)
        except FileNotFoundError as error:
            raise ReaderError("corruption", f"{row.name.key}: missing") from error
        size, what = self._size, fields.what
        fields.number("B", self._number, self._number, "the kind of digests")
        fields.reserved(1)
        blocks = fields.number("H", 1, 16, "the number of blocks")
        bases = fields.number("H", 0, 8, "the number of bases")
        fields.reserved(2)
        raw_length = fields.number("I", 1, CHUNK, "the raw length")
        fields.number("I", BLOCK, BLOCK, "the block size")
        recipe, digest = fields.take(8), fields.take(size)
        _known(any(recipe) == (bases > 0), f"{what}: {bases} bases and the recipe {recipe.hex()}")
        lengths = [min(BLOCK, raw_length - at) for at in range(0, raw_length, BLOCK)]
        _known(blocks == len(lengths), f"{what}: {blocks} blocks of {raw_length} bytes")
        _known(envelope == 56 + size + blocks * (size + 8) + bases * (size + 28), f"{what}: length of the envelope")
        table = []
        for length in lengths:
            block_digest, codec = fields.take(size), fields.number("B", 0, 1, "a codec")
            fields.reserved(3)
            encoded = fields.number("I", 1 if codec else length, length - 1 if codec else length, "an encoded length")
            table.append((block_digest, codec, length, encoded))
        names = []
        for _ in range(bases):
            names.append(self._name(fields))
            fields.unpack("Q")
            fields.number("Q", 0, CHUNK, "the length needed of a base")
        fields.take(16)
        stored = envelope + sum(encoded for *_, encoded in table)
        _sound(len(fields.data) == stored, f"{what}: {len(fields.data)} bytes instead of {stored}")
        follows = self._digest(struct.pack("<Q", raw_length) + b"".join(entry[0] for entry in table))
        _sound(follows == digest, f"{what}: the chunk digest does not follow from the blocks")
        _sound((digest, recipe) == (row.name.digest, row.name.recipe), f"{what}: another chunk")
        _sound((raw_length, stored, tuple(names)) == row[1:], f"{what}: not as its row says")
        return b"".join(self._block(fields, *entry) for entry in table)

    def _block(self, fields: _Fields, digest: bytes, codec: int, length: int, encoded: int) -> bytes:
        block = fields.take(encoded)
        if codec == 1:
            try:
                stated = zstandard.frame_content_size(block)
                _sound(stated == length, f"{fields.what}: a frame of {stated} bytes for a block of {length}")
                block = zstandard.ZstdDecompressor().decompress(block, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise ReaderError("corruption", f"{fields.what}: {error}") from error
        _sound(len(block) == length and self._digest(block) == digest, f"{fields.what}: wrong bytes in a block")
        return block

    def _lease(self, key: str) -> Lease:
        _, word, fields = self._open(key, (KIND_LEASE,), TEXT)
        _known(word == 0, f"{key}: reserved bytes that are not zero")
        holder, sequence, renewed = fields.unpack("16sQq")
        duration = fields.number("I", 0, 3600, "how long it lasts")
        host_length = fields.number("H", 0, 255, "the length of the host's name")
        fields.reserved(2)
        host = fields.take(host_length)
        fields.end()
        _sound(key == f".tierfs/leases/{holder.hex()}", f"{key}: the lease of another holder")
        try:
            return Lease(holder, sequence, renewed, duration, host.decode())
        except UnicodeDecodeError as error:
            raise ReaderError("format", f"{key}: the host's name") from error

    def _condemned(self, key: str) -> Condemned:
        _, word, fields = self._open(key, (KIND_CONDEMNED,), 56 + 44 * 1_000_000)
        _known(word == 0, f"{key}: reserved bytes that are not zero")
        epoch, published = fields.unpack("Qq")
        fields.number("B", self._number, self._number, "the kind of digests")
        fields.reserved(3)
        names = tuple(self._name(fields) for _ in range(fields.number("I", 0, 1_000_000, "the number of names")))
        fields.end()
        _sound(key == f".tierfs/gc/{epoch:016x}", f"{key}: the list of another epoch")
        _known(all(a.digest <= b.digest for a, b in pairwise(names)), f"{key}: names that are not sorted")
        return Condemned(epoch, published, names)


def main(arguments: list[str] | None = None) -> int:
    """Reads and verifies all files of a store, and lists them with their sizes and content digests."""
    (root,) = sys.argv[1:] if arguments is None else arguments
    reader = StoreReader(root)
    for path in reader.files():
        print(f"{len(reader.read(path)):>15,}  {reader.manifest(path).content_digest.hex()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
