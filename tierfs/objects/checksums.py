"""Checksums that endpoints verify before they store, puts that send one, and reads that are repeated on a mismatch.

`tierfs.objects.probe` tests which of them an endpoint verifies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from tierfs import digest
from tierfs.digest import Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StoreError,
)
from tierfs.format.descriptor import Capabilities
from tierfs.objects.protocol import OVERWRITE, Checksum, ObjectInfo, ObjectTier, PutMode

_logger = logging.getLogger("tierfs.objects")
_Value = TypeVar("_Value")


def _crc64nvme(data: Sequence[Buffer]) -> bytes:
    from awscrt import checksums  # noqa: PLC0415 - an extra, used for S3 only

    value = 0
    for piece in data:
        value = checksums.crc64nvme(piece, value)
    return value.to_bytes(8, "big")


def _crc32c(data: Sequence[Buffer]) -> bytes:
    import google_crc32c  # noqa: PLC0415 - an extra
    import numpy as np  # noqa: PLC0415 - slow to import

    value = 0
    for piece in data:
        # google_crc32c takes no bytearray and no memoryview, but an array, and does not copy it.
        value = google_crc32c.extend(value, np.frombuffer(piece, np.uint8))
    return int(value).to_bytes(4, "big")


def _hashed(name: str) -> Callable[[Sequence[Buffer]], bytes]:
    def compute(data: Sequence[Buffer]) -> bytes:
        state: Any = hashlib.new(name, usedforsecurity=False)
        for piece in data:
            state.update(piece)
        return bytes(state.digest())

    return compute


ALGORITHMS: dict[str, tuple[str, Callable[[Sequence[Buffer]], bytes]]] = {
    "xxh3-128": ("xxhash", lambda data: digest.checksum(*data)),
    "crc64nvme": ("awscrt", _crc64nvme),
    "crc32c": ("google_crc32c", _crc32c),
    "sha256": ("hashlib", _hashed("sha256")),
    "md5": ("hashlib", _hashed("md5")),
}
"""By name: the package that computes it, and the function. The value is big-endian, as S3 and GCS send it."""


@cache
def computable(algorithm: str) -> bool:
    return algorithm in ALGORITHMS and importlib.util.find_spec(ALGORITHMS[algorithm][0]) is not None


def compute(algorithm: str, data: Sequence[Buffer]) -> Checksum:
    """Compute the checksum of the joined pieces of ``data``.

    Raises:
        InvalidInputError: This process cannot compute ``algorithm``.
    """
    if not computable(algorithm):
        raise InvalidInputError(f"{algorithm} checksums cannot be computed here: choose one of {', '.join(ALGORITHMS)}")
    return Checksum(algorithm, ALGORITHMS[algorithm][1](data))


def checksum_for(capabilities: Capabilities, data: Sequence[Buffer]) -> Checksum | None:
    """Compute the checksum to send with ``data``: the first that the endpoint verifies and this process can compute.

    None if there is no such algorithm. Then `tierfs.objects.wrappers.verify` reads the stored bytes back.
    """
    for algorithm in capabilities.checksums:
        if computable(algorithm):
            return compute(algorithm, data)
    return None


def put_checked(objects: ObjectTier, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE) -> ObjectInfo:
    """Call `ObjectTier.put` with the checksum of `checksum_for`."""
    return objects.put(key, data, mode=mode, checksum=checksum_for(objects.capabilities, data))


def put_idempotent(objects: ObjectTier, key: str, data: bytes, *, mode: PutMode) -> ObjectInfo:
    """Call `put_checked` with a condition; if the condition fails but ``data`` is there, count the put as done.

    So a put whose answer was lost succeeds. Use this only for bytes that no other writer puts, or if it does not matter
    who put them.

    Raises:
        AlreadyExistsError, ConflictError: The condition failed, and ``data`` is not there.
        StoreError, CapacityError, ReadOnlyError: As `ObjectTier.put`.
    """
    try:
        return put_checked(objects, key, [data], mode=mode)
    except (AlreadyExistsError, ConflictError) as error:
        try:
            found, info = objects.read(key, len(data))
        except (NotFoundError, CorruptionError):
            raise error from None
        if found != data:
            raise
        return info


def twice(read: Callable[[], _Value]) -> _Value:
    """Call ``read``, and call it again if it finds damage: a bit may have flipped on the way, and not in the object."""
    try:
        return read()
    except (CorruptionError, FormatError) as error:  # a flipped bit in a version or kind gives a `FormatError`
        _logger.warning("reading again: %s", error)
        return read()


def read_decoded(
    objects: ObjectTier, key: str, limit: int, decode: Callable[[bytes, str], _Value], where: str
) -> tuple[_Value, ObjectInfo, bytes]:
    """Read a whole small object and decode it. What cannot be decoded is read once more.

    Args:
        limit: Its largest size in bytes.
        decode: Decodes the bytes. Its second argument is ``where``.
        where: Name of the object in errors.

    Raises:
        NotFoundError: No object is there.
        CorruptionError, FormatError: Both answers are damaged, too large, or of another version.
        StoreError, ReadOnlyError: The request failed.
    """

    def read() -> tuple[_Value, ObjectInfo, bytes]:
        data, info = objects.read(key, limit)
        return decode(data, where), info, data

    return twice(read)


def verify_checksum(checksum: Checksum | None, data: Sequence[Buffer], key: str) -> None:
    """Verify an XXH3-128 checksum, for a backend that verifies it itself before it stores.

    Raises:
        InvalidInputError: The checksum is of another algorithm.
        StoreError: The bytes do not have the checksum. Transient: they changed in transit, and the sender still has
            them.
    """
    if checksum is None:
        return
    if checksum.algorithm != "xxh3-128":
        raise InvalidInputError(f"this object tier verifies xxh3-128, not {checksum.algorithm}")
    if digest.checksum(*data) != checksum.value:
        raise StoreError(
            f"{key}: the bytes that arrived do not have the checksum sent with them", transient=True, path=key
        )
