"""Content digests: of a block, of a chunk, of a file.

A chunk's digest covers its length and its blocks' digests, so blocks can be hashed in parallel, on a GPU, and verified
one by one (FORMAT.md, "Digests").
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import xxhash

from tierfs.errors import InvalidInputError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A C-contiguous bytes-like object; writable if it is lent to be filled."""

BLOCK_BYTES = 1 << 20
CHUNK_BLOCKS = 16
CHUNK_BYTES = BLOCK_BYTES * CHUNK_BLOCKS
_FOREIGN = 0xF0


class DigestKind(enum.IntEnum):
    """The hash function that names a store's contents. The number is stored in every envelope and manifest."""

    XXH3_128 = 1
    BLAKE3 = 2

    @property
    def size(self) -> int:
        """Bytes of one digest."""
        return 16 if self is DigestKind.XXH3_128 else 32

    @property
    def label(self) -> str:
        """The name used in the descriptor and on the command line."""
        return "xxh3-128" if self is DigestKind.XXH3_128 else "blake3"

    @classmethod
    def from_label(cls, label: str) -> DigestKind:
        """Return the kind called ``label``.

        Raises:
            InvalidInputError: No digest has this name.
        """
        for kind in cls:
            if kind.label == label:
                return kind
        names = ", ".join(kind.label for kind in cls)
        raise InvalidInputError(f"unknown digest {label!r}: choose one of {names}")


def _blake3() -> Callable[[Any], bytes]:
    try:
        import blake3  # noqa: PLC0415 - only stores made with BLAKE3 need the package
    except ImportError as error:
        raise InvalidInputError(
            "this store uses BLAKE3 digests and the package is missing: pip install 'tierfs[fast]'"
        ) from error
    return lambda data: bytes(blake3.blake3(data).digest())


def hash_bytes(kind: DigestKind, data: Buffer) -> bytes:
    """Return the digest of raw bytes, in canonical big-endian form. Releases the GIL; thread-safe."""
    if kind is DigestKind.XXH3_128:
        return xxhash.xxh3_128(data).digest()  # before version 4, `xxh3_128_digest` keeps the GIL
    return _blake3()(data)


def combine(kind: DigestKind, length: int, parts: Iterable[bytes]) -> bytes:
    """Return the digest of ``length`` bytes from the digests of their parts: a chunk's blocks, or a file's chunks."""
    return hash_bytes(kind, length.to_bytes(8, "little") + b"".join(parts))


def digests_of(kind: DigestKind, raw: Buffer) -> tuple[list[bytes], bytes]:
    """Return the digests of a chunk's blocks, in order, and the digest of the chunk."""
    blocks = hash_blocks(kind, raw)
    return blocks, combine(kind, len(memoryview(raw)), blocks)


def hash_blocks(kind: DigestKind, raw: Buffer) -> list[bytes]:
    """Return the digests of consecutive blocks, in order."""
    view = memoryview(raw)
    return [hash_bytes(kind, view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]


def checksum(*pieces: Buffer) -> bytes:
    """Return XXH3-128 over ``pieces`` laid end to end, the checksum of headers and manifests."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def local_name(kind: DigestKind, chunk_digest: bytes) -> bytes:
    """Return the name that a chunk with this digest has in the local tiers."""
    return bytes((kind,)) + chunk_digest


def foreign_name(key: str, version: str, offset: int) -> bytes:
    """Return the local name of the chunk at ``offset`` of one version of an object that tierfs did not write."""
    return bytes((_FOREIGN,)) + checksum(key.encode(), b"\0", version.encode(), offset.to_bytes(8, "little"))
