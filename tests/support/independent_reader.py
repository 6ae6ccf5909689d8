"""A reader of tierfs stores, written from ``docs/reference/FORMAT.md`` alone. It shares no code with the package.

It reads a store in a local directory and checks everything that the specification lets a reader check.
``python independent_reader.py ROOT`` reads and verifies every file, and lists them with sizes and content digests.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import zstandard

MAGIC, BLOCK, CHUNK, MANIFEST, TEXT = b"\x89TIERFS\n", 1 << 20, 16 << 20, 16 << 20, 1 << 16
STORED, TABLE, BASES = CHUNK + TEXT, 1 << 30, 64
KINDS = (1, 2, 3, 4, 6, 7, 8, 9, 10)
KIND_CHUNK, KIND_FILE, KIND_TOMBSTONE, KIND_DIRECTORY, KIND_CONDEMNED, KIND_LEASE, *KINDS_OF_UPKEEP = KINDS
KIND_COLLECTOR, KIND_SCRUB, KIND_REFERENCES = KINDS_OF_UPKEEP
INLINE, INDIRECT = 1, 2
STORE, ZSTD, CONST, PLANE, DPLANE, SPARSE, DERIVE = range(7)
REFERENCES = {DPLANE: 1, SPARSE: 1, DERIVE: 2}  # codec: bytes of reference per byte of its block
ELEMENTS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # width: its format character for struct
DIGESTS = {"xxh3-128": (1, 16), "blake3": (2, 32)}  # name: number, size
COMPONENT = re.compile(r"(?:[A-Za-z0-9_.=+,@-]|![0-9a-f]{2})+")
RANGES = {"format": (1, 1), "created_ns": (-(1 << 63), (1 << 63) - 1), "block_bytes": (BLOCK, BLOCK),
          "chunk_bytes": (CHUNK, CHUNK), "inline_bytes": (0, TEXT), "chain_max": (0, 32), "lease_s": (1, 3600),
          "grace_s": (1, 31536000)}  # fmt: skip
PROMISES = ("conditional_create", "conditional_update", "list_after_write", "atomic_put", "host_local")


class ReaderError(Exception):
    """An object violates the specification. ``kind`` is ``corruption`` or ``format``, as in the table of errors."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class ChunkName(NamedTuple):
    """The name of a chunk object."""

    digest: bytes
    generation: int
    recipe: bytes

    @property
    def key(self) -> str:
        """The object's key below the store's root."""
        text, recipe = self.digest.hex(), f"-{self.recipe.hex()}" if any(self.recipe) else ""
        return f".tierfs/chunks/{text[:2]}/{text}.{self.generation}{recipe}"


class Row(NamedTuple):
    """One chunk of a file, or of the row table of a file."""

    name: ChunkName
    raw_length: int
    stored_length: int
    bases: tuple[ChunkName, ...]


class Base(NamedTuple):
    """A range of another chunk, which is part of a chunk's reference."""

    name: ChunkName
    raw_length: int
    stored_length: int
    offset: int
    length: int


class Block(NamedTuple):
    """One block of a chunk, and its position in the object."""

    digest: bytes
    codec: int
    length: int
    at: int
    encoded: int


class Chunk(NamedTuple):
    """A chunk object with a checked envelope. ``scale`` is the reference's length divided by the raw length."""

    key: str
    data: bytes
    blocks: tuple[Block, ...]
    bases: tuple[Base, ...]
    scale: int


class Tombstone(NamedTuple):
    """The record of a deleted path."""

    write_id: bytes
    deleted_ns: int
    deleted_version: int


class Manifest(NamedTuple):
    """The record of a live path. ``rows`` are the record's own: for an INDIRECT file, the chunks of its row table."""

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
    """A writer's lease, which it holds while it refers to chunks."""

    holder: bytes
    sequence: int
    renewed_ns: int
    duration_s: int
    host: str


class Condemned(NamedTuple):
    """The chunks that one mark of the collector found unreachable."""

    epoch: int
    published_ns: int
    names: tuple[ChunkName, ...]


def encode_path(path: str) -> str:
    """Return a path's key below ``.tierfs/tree/``, without the ``!`` of its record. ValueError if it is invalid."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] == ".tierfs":
        raise ValueError(f"no path: {path!r}")
    encoded = ["".join(chr(b) if COMPONENT.fullmatch(chr(b)) else f"!{b:02x}" for b in p.encode()) for p in parts]
    if max(map(len, encoded)) > 250 or sum(map(len, encoded)) + len(encoded) > 800:
        raise ValueError(f"the path is too long: {path!r}")
    return "/".join(encoded)


def decode_key(key: str) -> str | None:
    """Return the path of a key below ``.tierfs/tree/``, for a directory's marker with ``/``. None if it is invalid."""
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
    """Read the fields of an object in order. A field beyond the object's end is an error."""

    check = staticmethod(_known)

    def __init__(self, data: bytes, what: str, at: int = 0) -> None:
        self.data, self.what, self.at = data, what, at

    def take(self, size: int) -> bytes:
        self.check(size <= len(self.data) - self.at, f"{self.what}: fields beyond the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def number(self, form: str, low: int, high: int, name: str) -> int:
        value: int = self.unpack(form)[0]
        self.check(low <= value <= high, f"{self.what}: {name} is {value}")
        return value

    def reserved(self, size: int) -> None:
        self.check(not any(self.take(size)), f"{self.what}: reserved bytes that are not zero")

    def end(self) -> None:
        self.check(self.at == len(self.data), f"{self.what}: bytes after the last field")


class _Encoded(_Fields):
    """The encoded bytes of a block. Every error in them counts as damage."""

    check = staticmethod(_sound)

    def width(self) -> int:
        width = self.unpack("B")[0]
        self.check(width in ELEMENTS, f"{self.what}: elements of {width} bytes")
        return int(width)

    def head(self, size: int) -> tuple[int, int, int]:
        """Read the head of a plane. Return the plane's size, its mode and the length of its data."""
        mode, length = self.unpack("BI")
        part = 8 * (size // 64)
        fits = {
            0: length == size,
            1: length == 1 and size > 0,
            2: 1 <= length < size,
            3: 6 <= length < size,
            4: part > 0 and length == size - part,
            5: length in (2 * size, 0),
            6: 9 <= length < size,
        }
        self.check(fits.get(mode, False), f"{self.what}: mode {mode} and {length} bytes for a plane of {size}")
        return size, mode, length

    def all_fit(self, heads: list[tuple[int, int, int]], tail: int) -> None:
        left = len(self.data) - self.at
        self.check(sum(head[2] for head in heads) + tail == left, f"{self.what}: lengths that do not add up")

    def plane(self, size: int, mode: int, length: int) -> bytes:
        self.check(mode != 5, f"{self.what}: a woven plane by itself")
        data = self.take(length)
        if mode == 0:
            return data
        if mode == 1:
            return data * size
        if mode == 3:
            return self._codes(data, size)
        if mode == 6:
            return self._mostly(data, size)
        return self._seven(data, size) if mode == 4 else _frame(data, size, self.what)

    def _codes(self, data: bytes, size: int) -> bytes:
        first, count = struct.unpack_from("<BI", data)
        start = 5 + 5 * count
        self.check(start < len(data), f"{self.what}: {count} bytes without a code in {len(data)}")
        positions = struct.unpack_from(f"<{count}I", data, 5)
        self.check(all(at < size for at in positions), f"{self.what}: a byte beyond a plane of {size}")
        pairs = _frame(data[start:], (size + 1) // 2, self.what)
        plane = bytearray((first + code) % 256 for pair in pairs for code in (pair & 15, pair >> 4))
        for at, byte in zip(positions, data[start - count : start], strict=True):
            plane[at] = byte
        return bytes(plane[:size])

    def _seven(self, data: bytes, size: int) -> bytes:
        part = 8 * (size // 64)
        last = bytearray(part)
        for k in range(7):
            for j in range(part):
                last[j] |= (data[k * part + j] >> 7) << k
        return bytes(byte & 0x7F for byte in data[: 7 * part]) + last + data[7 * part :]

    def _mostly(self, data: bytes, size: int) -> bytes:
        most, count, gaps = struct.unpack_from("<BII", data)
        self.check(9 + gaps + count == len(data), f"{self.what}: {count} other bytes and {gaps} gaps")
        places = _places(data[9 : 9 + gaps], count, size, self.what)
        plane = bytearray([most]) * size
        for at, byte in zip(places, data[9 + gaps :], strict=True):
            plane[at] = byte
        return bytes(plane)

    def elements(self, width: int, heads: list[tuple[int, int, int]], *, as_it_is: bool = True) -> tuple[int, ...]:
        data = bytearray(heads[0][0] * width)
        left = list(enumerate(heads))
        while left:
            index, (size, mode, length) = left.pop(0)
            if mode == 5 and width > 1 and index % 2 == 0 and (as_it_is or index):
                self.check(length == 2 * size, f"{self.what}: two planes of {size} bytes in {length}")
                self.check(left.pop(0)[1] == (size, 5, 0), f"{self.what}: half of two woven planes")
                woven = self.take(length)
                data[width - 1 - index :: width], data[width - 2 - index :: width] = woven[1::2], woven[::2]
            else:
                data[width - 1 - index :: width] = self.plane(size, mode, length)
        return _elements(data, width)


def _elements(data: bytes | bytearray, width: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{len(data) // width}{ELEMENTS[width]}", data)


def _frame(data: bytes, size: int, what: str) -> bytes:
    try:
        parameters = zstandard.get_frame_parameters(data)
        _sound(parameters.content_size == size, f"{what}: a frame of {parameters.content_size} bytes, not {size}")
        _sound(parameters.dict_id == 0, f"{what}: a frame with a dictionary")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ReaderError("corruption", f"{what}: {error}") from error


def _planes(codec: int, fields: _Encoded, size: int, base: bytes) -> bytes:
    width = fields.width()
    order = fields.number("B", 0, 2, "the order of the bits")
    fields.check(order == 0 or (width > 1 and order == codec - PLANE + 1), f"{fields.what}: bits in order {order}")
    heads = [fields.head(size // width) for _ in range(width)]
    fields.all_fit(heads, size % width)
    found, bits = fields.elements(width, heads, as_it_is=order == 0), 8 * width
    mask, low = (1 << bits) - 1, bits - 16
    if order == 1:
        found = tuple(_sign_first(value >> low) << low | value & ((1 << low) - 1) for value in found)
    elif order == 2:
        found = tuple((_unzigzag(value >> low) & 0xFFFF) << low | value & ((1 << low) - 1) for value in found)
    elif codec == DPLANE:
        found = tuple(map(_unzigzag, found))
    if codec == DPLANE:
        found = tuple((old + value) & mask for value, old in zip(found, _elements(base, width), strict=True))
    return struct.pack(f"<{len(found)}{ELEMENTS[width]}", *found) + fields.take(size % width)


def _sign_first(upper: int) -> int:
    return (upper >> 7 & 1) << 15 | upper >> 8 << 7 | upper & 0x7F


def _unzigzag(number: int) -> int:
    return number >> 1 ^ -(number & 1)


def _sparse(fields: _Encoded, size: int, base: bytes) -> bytes:
    width = fields.width()
    fields.reserved(1)
    found, mask = list(_elements(base, width)), (1 << 8 * width) - 1
    for at, zigzag in _placed(fields, size, width):
        found[at] = (found[at] + _unzigzag(zigzag)) & mask
    return struct.pack(f"<{len(found)}{ELEMENTS[width]}", *found) + fields.take(size % width)


def _derive(fields: _Encoded, size: int, base: bytes) -> bytes:
    fields.number("B", 1, 1, "the function")
    found = [
        0x7FFF if x & 0x7FFFFFFF > 0x7F800000 else (x + 0x7FFF + (x >> 16 & 1)) >> 16
        for x in _elements(base[: size // 2 * 4], 4)
    ]
    for at, value in _placed(fields, size, 2):
        found[at] = value
    return struct.pack(f"<{size // 2}H", *found) + fields.take(size % 2)


def _placed(fields: _Encoded, size: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the elements that a block gives explicitly: their positions and stored numbers."""
    count = size // width
    some = fields.number("I", 0, count, "how many elements are given")
    gap_bytes = fields.number("I", 0, some + (count - some) // 255, "the number of gap bytes")
    heads = [fields.head(gap_bytes), *(fields.head(some) for _ in range(width))]
    fields.all_fit(heads, size % width)
    places = _places(fields.plane(*heads[0]), some, count, fields.what)
    yield from zip(places, fields.elements(width, heads[1:]), strict=True)


def _places(gaps: bytes, some: int, count: int, what: str) -> list[int]:
    """Return the positions of ``some`` elements among ``count``, from the gaps between them."""
    ends = len(gaps) - gaps.count(255)
    _sound(ends == some and gaps[-1:] != b"\xff", f"{what}: {ends} gaps for {some} elements")
    _sound(sum(gaps) + some <= count, f"{what}: gaps beyond the last element")
    places, at = [], 0
    for gap in gaps:
        at += gap
        if gap < 255:
            places.append(at)
            at += 1
    return places


def _decode(codec: int, fields: _Encoded, size: int, base: bytes) -> bytes:
    """Return the ``size`` raw bytes of a block."""
    data = fields.data
    if codec in (STORE, ZSTD):
        return data if codec == STORE else _frame(data, size, fields.what)
    if codec == CONST:
        _sound(len(data) in ELEMENTS, f"{fields.what}: an element of {len(data)} bytes")
        return (data * (size // len(data) + 1))[:size]
    if codec in (PLANE, DPLANE):
        block = _planes(codec, fields, size, base)
    else:
        block = (_sparse if codec == SPARSE else _derive)(fields, size, base)
    fields.end()
    return block


class StoreReader:
    """A store in a local directory.

    Every method raises ReaderError if an object it needs violates the specification.

    Args:
        root: The directory.
        blake3: Returns the 32-byte BLAKE3 digest of some bytes. Only a store with such digests needs it.

    Attributes:
        descriptor: The store's checked descriptor.
        codecs: Number of decoded blocks by codec.

    Raises:
        FileNotFoundError: There is no store.
    """

    def __init__(self, root: str | os.PathLike[str], blake3: Callable[[bytes], bytes] | None = None) -> None:
        self._root = Path(root)
        self.codecs: Counter[int] = Counter()
        self.descriptor = self._read_descriptor()
        functions = {"xxh3-128": _checksum, "blake3": blake3}
        digest = functions.get(self.descriptor["digest"])
        if digest is None:
            raise ReaderError("format", f"descriptor: digest {self.descriptor['digest']}")
        self._digest, (self._number, self._size) = digest, DIGESTS[self.descriptor["digest"]]

    def records(self) -> dict[str, Manifest | Tombstone]:
        """Return every record by path, without reading contents. The path of a directory's marker ends with ``/``."""
        paths = (decode_key(key.removeprefix(".tierfs/tree/")) for key in self._keys(".tierfs/tree"))
        return {path: self.record(path) for path in sorted(path for path in paths if path is not None)}

    def files(self) -> list[str]:
        return [path for path, item in self.records().items() if isinstance(item, Manifest) and path[-1] != "/"]

    def directories(self) -> list[str]:
        """Return the paths of all directories with a live marker."""
        return [path[:-1] for path, item in self.records().items() if isinstance(item, Manifest) and path[-1] == "/"]

    def tombstones(self) -> list[str]:
        """Return the paths of all tombstones. The path of a directory's marker ends with ``/``."""
        return [path for path, item in self.records().items() if isinstance(item, Tombstone)]

    def leases(self) -> list[Lease]:
        """Return all leases, expired ones included."""
        return [self._lease(key) for key in self._keys(".tierfs/leases")]

    def condemned(self) -> list[Condemned]:
        """Return all condemned lists in the order of their epochs."""
        listed = [key for key in self._keys(".tierfs/gc") if re.fullmatch("[0-9a-f]{16}", key.rpartition("/")[2])]
        return [self._condemned(key) for key in listed]

    def collector(self) -> dict[str, Any]:
        """Return the fields of the collector's record. Raises FileNotFoundError if there is none."""
        _, word, fields = self._open(".tierfs/gc/collector", (KIND_COLLECTOR,), (1 << 20) + 256)
        _known(word == 0, "collector: reserved bytes that are not zero")
        (holder,) = fields.unpack("16s")
        fence = fields.number("Q", 0, (1 << 48) - 1, "the number of the gc")
        (sequence,) = fields.unpack("Q")
        duration = fields.number("I", 0, 3600, "how long a turn lasts")
        notes = _json(fields.take(fields.number("I", 0, 1 << 20, "the length of the notes")), "format", "collector")
        fields.end()
        return {"holder": holder, "fence": fence, "sequence": sequence, "duration": duration, **notes}

    def scrub(self) -> dict[str, Any]:
        """Return the notes of the scrub record. Raises FileNotFoundError if there is none."""
        _, word, fields = self._open(".tierfs/scrub/record", (KIND_SCRUB,), (4 << 20) + 256)
        _known(word == 0, "scrub record: reserved bytes that are not zero")
        notes = _json(fields.take(fields.number("I", 0, 4 << 20, "the length of the notes")), "format", "scrub record")
        fields.end()
        return notes

    def references(self, path: str) -> tuple[list[bytes], list[bytes]]:
        """Return record checks and chunk names from a checkpoint's list. FileNotFoundError if it has none."""
        key = f".tierfs/references/{_checksum(f'{path}/'.encode()).hex()}"
        _, word, fields = self._open(key, (KIND_REFERENCES,), 1 << 26)
        _known(word == 0, f"{key}: reserved bytes that are not zero")
        kind, reserved = fields.unpack("BB")
        _known(
            (kind, reserved) == (self._number, 0),
            f"{key}: digests of another kind, or reserved bytes that are not zero",
        )
        length = fields.number("H", 0, 4096, "the length of the path")
        records = fields.number("I", 0, 1_000_000, "the number of records")
        names = fields.number("I", 0, 1_000_000, "the number of names")
        _known(bytes(fields.take(length)) == path.encode(), f"{key}: the list of another directory")
        checks = [bytes(fields.take(16)) for _ in range(records)]
        found = [bytes(fields.take(self._size + 12)) for _ in range(names)]
        fields.end()
        _known(checks == sorted(checks) and found == sorted(set(found)), f"{key}: not in order")
        return checks, found

    def record(self, path: str) -> Manifest | Tombstone:
        """Return the record of a path, with ``/`` of a directory's marker. FileNotFoundError if it has none."""
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
        """Return the record of a live path, see ``record``. FileNotFoundError if it has none, or a tombstone."""
        record = self.record(path)
        if isinstance(record, Tombstone):
            raise FileNotFoundError(path)
        return record

    def rows(self, manifest: Manifest) -> tuple[Row, ...]:
        """Return the chunks of a file, for an INDIRECT file from its table. Check length and content digest."""
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
        _known(digest == manifest.content_digest, "the content digest does not follow from the content")
        return rows

    def read(self, path: str) -> bytes:
        """Return the content of a file with every byte verified. Raises FileNotFoundError if there is no such file."""
        manifest = self.manifest(path)
        return b"".join(map(self._chunk, self.rows(manifest))) or manifest.inline

    def chunk_names(self, path: str) -> list[ChunkName]:
        """Return every chunk object that reading a file needs: those of its table and content, and their bases."""
        manifest = self.manifest(path)
        rows = dict.fromkeys(manifest.rows + self.rows(manifest))
        return list(dict.fromkeys(name for row in rows for name in (row.name, *row.bases)))

    def _keys(self, below: str) -> list[str]:
        found = (Path(at, name) for at, _, names in os.walk(self._root / below) for name in names)
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def _get(self, key: str, limit: int) -> bytes:
        with open(self._root / key, "rb") as file:
            _sound(os.fstat(file.fileno()).st_size <= limit, f"{key}: over {limit} bytes")
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
        _known(value.get("features", []) == [], f"descriptor: features {value.get('features')}")
        promises = [endpoint.get(name) for name in PROMISES] if isinstance(endpoint, dict) else [None]
        _known(all(isinstance(promise, bool) for promise in promises), "descriptor: endpoint")
        return value

    def _open(self, key: str, kinds: tuple[int, ...], limit: int) -> tuple[int, int, _Fields]:
        """Check an object's header and checksum. Return its kind, the word in its header, and the fields behind."""
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
        stored_length = fields.number("I", 0, STORED, "the stored length of a row")
        generation, recipe = fields.unpack("I8s")
        bases = fields.number("H", 0, BASES, "the number of bases of a row")
        fields.reserved(2)
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
        _known(bool(rows) or not flags & INDIRECT, f"{fields.what}: a table without chunks")
        table = sum(row.raw_length for row in rows) if flags & INDIRECT else 0
        _known(table <= TABLE, f"{fields.what}: a row table of {table} bytes")
        _known(kind == KIND_FILE or (flags, length) == (INLINE, 0), f"{fields.what}: a directory with content")
        values = _json(metadata, "format", f"{fields.what}: metadata") if metadata else {}
        return Manifest(
            flags, write_id, length, created, modified, element_type, previous, values, digest, inline, rows
        )

    def _chunk(self, row: Row) -> bytes:
        return self._content(Base(*row[:3], 0, row.raw_length), row, self.descriptor["chain_max"] + 1)

    def _content(self, wanted: Base, row: Row, steps_left: int) -> bytes:
        """Return a range of raw bytes of a file's chunk or of one of its bases. The row must name that base, too."""
        _known(wanted.name in (row.name, *row.bases), f"{wanted.name.key}: a base that is not in the row")
        chunk = self._envelope(wanted)
        first, last = wanted.offset // BLOCK, (wanted.offset + wanted.length - 1) // BLOCK
        blocks = []
        for index in range(first, last + 1):
            block, what = chunk.blocks[index], f"{chunk.key}: block {index}"
            _known(block.codec <= DERIVE, f"{what}: unknown codec {block.codec}")
            base = b""
            if block.codec in REFERENCES:
                _known(REFERENCES[block.codec] == chunk.scale, f"{what}: a codec without its reference")
                _known(steps_left > 0, f"{what}: too many chunks, one encoded against the other")
                base = self._reference(chunk, index, row, steps_left - 1)
            encoded = _Encoded(chunk.data[block.at : block.at + block.encoded], what)
            raw = _decode(block.codec, encoded, block.length, base)
            _sound(len(raw) == block.length and self._digest(raw) == block.digest, f"{what}: wrong bytes")
            self.codecs[block.codec] += 1
            blocks.append(raw)
        offset = wanted.offset - first * BLOCK
        return b"".join(blocks)[offset : offset + wanted.length]

    def _reference(self, chunk: Chunk, index: int, row: Row, steps_left: int) -> bytes:
        """Return the part of a chunk's reference that belongs to one of its blocks."""
        start, found, at = chunk.scale * index * BLOCK, [], 0
        stop = start + chunk.scale * chunk.blocks[index].length
        for base in chunk.bases:
            low, high = max(start, at), min(stop, at + base.length)
            if low < high:
                part = base._replace(offset=base.offset + low - at, length=high - low)
                found.append(self._content(part, row, steps_left))
            at += base.length
        return b"".join(found)

    def _envelope(self, wanted: Base) -> Chunk:
        """Return the chunk object that a row or a base table names, without decoding it."""
        try:
            _, envelope, fields = self._open(wanted.name.key, (KIND_CHUNK,), STORED)
        except FileNotFoundError as error:
            raise ReaderError("corruption", f"{wanted.name.key}: missing") from error
        size, what = self._size, fields.what
        fields.number("B", self._number, self._number, "the kind of digests")
        fields.reserved(1)
        block_count = fields.number("H", 1, 16, "the number of blocks")
        base_count = fields.number("H", 0, BASES, "the number of bases")
        fields.reserved(2)
        raw_length = fields.number("I", 1, CHUNK, "the raw length")
        fields.number("I", BLOCK, BLOCK, "the block size")
        recipe, digest = fields.take(8), fields.take(size)
        lengths = [min(BLOCK, raw_length - at) for at in range(0, raw_length, BLOCK)]
        _known(block_count == len(lengths), f"{what}: {block_count} blocks of {raw_length} bytes")
        tables = block_count * (size + 8) + base_count * (size + 28)
        _known(envelope == 56 + size + tables, f"{what}: length of the envelope")
        blocks, at = [], envelope
        for length in lengths:
            block_digest, codec = fields.take(size), fields.unpack("BB")[0]
            fields.reserved(2)
            low, high = (length, length) if codec == STORE else (1, length - 1)
            encoded = fields.number("I", low, high, "an encoded length")
            blocks.append(Block(block_digest, codec, length, at, encoded))
            at += encoded
        table = fields.data[fields.at : envelope - 16]
        bases = tuple(self._base(fields) for _ in range(base_count))
        scale = self._scale(bases, raw_length, what)
        follows = _checksum(table)[:8] if bases else bytes(8)
        follows = bytes(7) + b"\1" if bases and not any(follows) else follows
        _known(recipe == follows, f"{what}: the recipe does not follow from the bases")
        _sound(len(fields.data) == at, f"{what}: {len(fields.data)} bytes instead of {at}")
        follows = self._digest(struct.pack("<Q", raw_length) + b"".join(block.digest for block in blocks))
        _sound(follows == digest, f"{what}: the chunk digest does not follow from the blocks")
        _sound((digest, recipe) == (wanted.name.digest, wanted.name.recipe), f"{what}: another chunk")
        _sound((raw_length, at) == (wanted.raw_length, wanted.stored_length), f"{what}: not as its row says")
        return Chunk(what, fields.data, tuple(blocks), bases, scale)

    def _base(self, fields: _Fields) -> Base:
        name, raw_length = self._name(fields), fields.number("I", 1, CHUNK, "the raw length of a base")
        stored_length, offset = fields.number("I", 0, STORED, "the stored length of a base"), fields.unpack("I")[0]
        length = fields.number("I", 1, CHUNK, "the length needed of a base")
        _known(offset + length <= raw_length, f"{fields.what}: a range beyond the end of its base")
        return Base(name, raw_length, stored_length, offset, length)

    def _scale(self, bases: tuple[Base, ...], raw_length: int, what: str) -> int:
        reference = sum(base.length for base in bases)
        _known(not bases or reference in (raw_length, 2 * raw_length), f"{what}: a reference of {reference} bytes")
        return reference // raw_length

    def _lease(self, key: str) -> Lease:
        _, word, fields = self._open(key, (KIND_LEASE,), TEXT)
        _known(word == 0, f"{key}: reserved bytes that are not zero")
        holder, sequence, renewed = fields.unpack("16sQq")
        duration = fields.number("I", 0, 3600, "how long it lasts")
        host_length = fields.number("H", 0, 255, "the length of the host's name")
        fields.reserved(2)
        host = fields.take(host_length)
        fields.end()
        _known(key == f".tierfs/leases/{holder.hex()}", f"{key}: the lease of another holder")
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
        _known(key == f".tierfs/gc/{epoch:016x}", f"{key}: the list of another epoch")
        return Condemned(epoch, published, names)


def main(arguments: list[str] | None = None) -> int:
    """Read and verify all files of a store, and list them with their sizes and content digests."""
    (root,) = sys.argv[1:] if arguments is None else arguments
    reader = StoreReader(root)
    for path in reader.files():
        print(f"{len(reader.read(path)):>15,}  {reader.manifest(path).content_digest.hex()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
