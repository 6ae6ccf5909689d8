"""Map paths and chunk names to object keys below a store's root, and back.

FORMAT.md, "Keys". A key component that ends in ``!`` is a record, and any other is a directory. So a record and a
directory of the same name never collide, not even on a backend whose keys are real file names.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from tierfs import digest
from tierfs.digest import DigestKind
from tierfs.errors import FormatError, InvalidInputError

PRIVATE = ".tierfs"
DESCRIPTOR = f"{PRIVATE}/store.json"
CHUNKS = f"{PRIVATE}/chunks/"
TREE = f"{PRIVATE}/tree/"
GC = f"{PRIVATE}/gc/"
COLLECTOR = f"{GC}collector"
LEASES = f"{PRIVATE}/leases/"
LOST = f"{PRIVATE}/lost/"
PEERS = f"{PRIVATE}/peers/"
PROBE = f"{PRIVATE}/probe/"
REFERENCES = f"{PRIVATE}/references/"
SCRUB = f"{PRIVATE}/scrub/record"

PATH_BYTES_MAX = 800
COMPONENT_BYTES_MAX = 250
NO_RECIPE = bytes(8)
GENERATION_MAX = (1 << 32) - 1

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=+,@")
_PLAIN_COMPONENT = re.compile(r"[A-Za-z0-9\-_.=+,@]*")
# The character of the byte that each escape stands for. No path has a NUL, and no part of a path has a slash.
_ESCAPED = {f"{byte:02x}": chr(byte) for byte in range(1, 256) if byte not in _PLAIN and byte != ord("/")}
_DOTS = frozenset({".", ".."})
_CONDEMNED = re.compile(r"[0-9a-f]{16}")
_CHUNK = re.compile(r"([0-9a-f]{2})/([0-9a-f]{32}|[0-9a-f]{64})\.(0|[1-9][0-9]{0,9})(?:-([0-9a-f]{16}))?")


class ChunkName(NamedTuple):
    """The name of one chunk object: the digest of its content, the copy, and the encoding."""

    digest: bytes
    generation: int = 0
    recipe: bytes = NO_RECIPE

    def encode(self) -> bytes:
        """Return the `name_bytes` bytes of the name in a table."""
        return self.digest + self.generation.to_bytes(4, "little") + self.recipe

    @classmethod
    def decode(cls, data: bytes) -> ChunkName:
        """Return the name that `encode` turned into these bytes."""
        return cls(data[:-12], int.from_bytes(data[-12:-8], "little"), data[-8:])


def name_bytes(kind: DigestKind) -> int:
    """Return the bytes of an encoded `ChunkName`: digest, generation and recipe."""
    return kind.size + 12


def _encode(component: str) -> str:
    if _PLAIN_COMPONENT.fullmatch(component):
        return component
    return "".join(chr(byte) if byte in _PLAIN else f"!{byte:02x}" for byte in component.encode())


def validate_path(path: str) -> str:
    """Check a path relative to the store's root, and return it.

    Raises:
        InvalidInputError: The path is empty, absolute, below ``.tierfs``, not UTF-8, or over a limit; or it has ``.``,
            ``..``, an empty part or a NUL.
    """
    parts = path.split("/")
    problem = ""
    if not path or not parts[0]:
        problem = "it is empty or absolute: give a path relative to the store"
    elif not all(parts):
        problem = "it has an empty part ('//' or a '/' at its end)"
    elif "." in parts or ".." in parts:
        problem = "'.' and '..' are not allowed: name the file directly"
    elif "\0" in path:
        problem = "it has a NUL byte"
    elif parts[0] == PRIVATE:
        problem = f"{PRIVATE} holds the store's own objects"
    else:
        try:
            encoded = [_encode(part) for part in parts]
        except UnicodeEncodeError:
            problem = "it is not valid Unicode"
        else:
            if max(map(len, encoded)) > COMPONENT_BYTES_MAX:
                problem = f"a part of it is over the limit of {COMPONENT_BYTES_MAX} bytes in encoded form"
            elif sum(map(len, encoded)) + len(encoded) > PATH_BYTES_MAX:
                problem = f"it is over the limit of {PATH_BYTES_MAX} bytes in encoded form"
    if problem:
        shown = path if len(path) <= PATH_BYTES_MAX else path[:80] + "..."
        raise InvalidInputError(f"bad path {shown!r}: {problem}", path=shown)
    return path


def inside(directory: str, name: str) -> str:
    """Return the path of ``name`` in a directory of a store. ``""`` is the root."""
    return f"{directory}/{name}" if directory else name


def is_at_or_below(path: str, directory: str) -> bool:
    """Return whether ``path`` is ``directory`` or lies below it. Every path lies below ``""``."""
    return not directory or path == directory or path.startswith(f"{directory}/")


@functools.lru_cache(maxsize=1024)  # a program looks at a file again and again
def record_key(path: str) -> str:
    """Return the key of the record of the file ``path``: its manifest, or its tombstone."""
    return TREE + "/".join(_encode(part) for part in validate_path(path).split("/")) + "!"


def directory_prefix(path: str) -> str:
    """Return the prefix of the keys of all records below the directory ``path``. ``""`` is the root."""
    if not path:
        return TREE
    return TREE + "/".join(_encode(part) for part in validate_path(path).split("/")) + "/"


def marker_key(path: str) -> str:
    """Return the key of the marker that keeps the directory ``path`` in existence when it is empty."""
    return directory_prefix(path) + "!"


def parse_record_key(key: str) -> str:
    """Return the path whose record lies at ``key``.

    The path of a directory's marker ends with ``/``; that of the root's is ``"/"``.

    Raises:
        FormatError: No path's record lies there.
    """
    inside = key.removeprefix(TREE)
    above, slash, last = inside.rpartition("/")
    if last[-1:] != "!":
        raise FormatError(f"{key!r} is not the key of a record: not written by tierfs", path=key)
    parent = _parse_directory(above) if slash else ""
    if last == "!":
        return f"{parent}/"
    name = parse_component(last[:-1])
    if name in _DOTS or len(inside) > PATH_BYTES_MAX or (name == PRIVATE and not slash):
        raise FormatError(f"{key!r} is not the key of a record: no path may have this name or length", path=key)
    return f"{parent}/{name}" if slash else name


@functools.lru_cache(maxsize=4096)
def _parse_directory(encoded: str) -> str:
    """Return the path of the directory whose records lie there.

    Cached, because a listing has all names of a directory next to each other.

    Raises:
        FormatError: No directory's records lie there.
    """
    above, slash, last = encoded.rpartition("/")
    name = parse_component(last)
    if name in _DOTS or len(encoded) >= PATH_BYTES_MAX or (name == PRIVATE and not slash):
        raise FormatError(
            f"{encoded!r} is not a directory of records: no path may have this name or length", path=encoded
        )
    return f"{_parse_directory(above)}/{name}" if slash else name


def parse_component(encoded: str) -> str:
    """Decode one encoded part of a path.

    Raises:
        FormatError: No name encodes to this.
    """
    if _PLAIN_COMPONENT.fullmatch(encoded) and 0 < len(encoded) <= COMPONENT_BYTES_MAX:
        return encoded
    plain, *escaped = encoded.split("!")
    try:
        name = "".join([plain, *(_ESCAPED[part[:2]] + part[2:] for part in escaped)]).encode("latin-1").decode()
    except (KeyError, UnicodeError):
        name = ""
    if not name or len(encoded) > COMPONENT_BYTES_MAX or not _PLAIN_COMPONENT.fullmatch(encoded.replace("!", "")):
        raise FormatError(f"{encoded!r} is not an encoded name: not written by tierfs", path=encoded)
    return name


def chunk_key(name: ChunkName) -> str:
    text = name.digest.hex()
    recipe = "" if name.recipe == NO_RECIPE else f"-{name.recipe.hex()}"
    return f"{CHUNKS}{text[:2]}/{text}.{name.generation}{recipe}"


def parse_chunk_key(key: str, kind: DigestKind) -> ChunkName:
    """Return the name that `chunk_key` turned into this key.

    Raises:
        FormatError: The key is no chunk's in a store with digests of this kind.
    """
    match = _CHUNK.fullmatch(key.removeprefix(CHUNKS))
    if match is None or match[2][:2] != match[1] or len(match[2]) != 2 * kind.size or int(match[3]) > GENERATION_MAX:
        raise FormatError(f"{key!r} is not the key of a chunk", path=key)
    return ChunkName(bytes.fromhex(match[2]), int(match[3]), bytes.fromhex(match[4]) if match[4] else NO_RECIPE)


def lease_key(holder: bytes) -> str:
    return f"{LEASES}{holder.hex()}"


def references_key(path: str) -> str:
    """Return the key of the reference list of the checkpoint in the directory ``path``; ``""`` is the root."""
    return f"{REFERENCES}{digest.checksum(f'{path}/'.encode()).hex()}"


def is_condemned_key(key: str) -> bool:
    return _CONDEMNED.fullmatch(key.removeprefix(GC)) is not None


def condemned_key(epoch: int) -> str:
    """Return the key of the list of chunks condemned in this epoch. Keys sort as epochs do."""
    return f"{GC}{epoch:016x}"
