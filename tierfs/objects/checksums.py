"""Checksums that endpoints verify before they store, each computed in native code, and puts that carry one.

Which of them an endpoint verifies is found out by trying (`tierfs.objects.probe`).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tierfs import digest
from tierfs.digest import Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreError,
)
from tierfs.format.descriptor import Capabilities
from tierfs.objects.protocol import OVERWRITE, Checksum, ObjectInfo, ObjectTier, PutMode

__all__ = ["ALGORITHMS", "checksum_for", "compute", "put_checked", "put_idempotent", "verify_checksum"]


def _crc64nvme(data: Sequence[Buffer]) -> bytes:
    from awscrt import checksums  # noqa: PLC0415 - an extra, and S3's alone

    value = 0
    for piece in data:
        value = checksums.crc64nvme(piece, value)
    return value.to_bytes(8, "big")


def _crc32c(data: Sequence[Buffer]) -> bytes:
    import google_crc32c  # noqa: PLC0415 - an extra
    import numpy as np  # noqa: PLC0415 - slow to import

    value = 0
    for piece in data:
        # It takes neither a bytearray nor a view, and an array without copying it.
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
"""By name: the package that computes it, and how. The value is big-endian, as every cloud writes it."""


@cache
def computable(algorithm: str) -> bool:
    """Whether this process can compute it."""
    return algorithm in ALGORITHMS and importlib.util.find_spec(ALGORITHMS[algorithm][0]) is not None


def compute(algorithm: str, data: Sequence[Buffer]) -> Checksum:
    """The checksum of ``data``, laid end to end.

    Raises:
        InvalidInputError: Nobody here computes that one.
    """
    if not computable(algorithm):
        raise InvalidInputError(f"{algorithm} is no checksum that can be computed here: have {', '.join(ALGORITHMS)}")
    return Checksum(algorithm, ALGORITHMS[algorithm][1](data))


def checksum_for(capabilities: Capabilities, data: Sequence[Buffer]) -> Checksum | None:
    """The checksum to send with ``data``: the first that the endpoint verifies and this process can compute.

    ``None`` where there is none: then what is stored is read back (`tierfs.objects.wrappers.verify`).
    """
    for algorithm in capabilities.checksums:
        if computable(algorithm):
            return compute(algorithm, data)
    return None


def put_checked(objects: ObjectTier, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE) -> ObjectInfo:
    """`ObjectTier.put` with the checksum of `checksum_for`."""
    return objects.put(key, data, mode=mode, checksum=checksum_for(objects.capabilities, data))


def put_idempotent(objects: ObjectTier, key: str, data: bytes, *, mode: PutMode) -> ObjectInfo:
    """`put_checked` under a condition, where a put whose answer was lost counts as done: what stands is what was sent.

    The bytes must be such that nobody else puts the same ones, or that it does not matter who did.

    Raises:
        AlreadyExistsError, ConflictError: Something else stands there.
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


def verify_checksum(checksum: Checksum | None, data: Sequence[Buffer], key: str) -> None:
    """Verify XXH3-128, for a backend that does so itself before it stores.

    Raises:
        InvalidInputError: Another algorithm.
        StoreError: The bytes do not have the checksum: they changed on the way; transient, since the sender has them.
    """
    if checksum is None:
        return
    if checksum.algorithm != "xxh3-128":
        raise InvalidInputError(f"this object tier verifies xxh3-128, not {checksum.algorithm}")
    if digest.checksum(*data) != checksum.value:
        raise StoreError(
            f"{key}: the bytes that arrived do not have the checksum sent with them", transient=True, path=key
        )
