"""A chunk that was acknowledged as stored is stored and correct, even if the answer to its put was lost."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tierfs.digest import Buffer, DigestKind
from tierfs.errors import CorruptionError, StoreError
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.objects import OVERWRITE, Checksum, MemoryObjects, ObjectInfo, WrappedObjects, as_promised
from tierfs.objects.protocol import PutMode
from tierfs.store import Store
from tierfs.store.chunks import fetch, store_chunk

CONTENT = bytes(range(256)) * (6 << 10)
UNCHECKED = replace(MemoryObjects("/").capabilities, checksums=(), host_local=False)


class FlipsAndForgets(WrappedObjects):
    """An endpoint without checksums. It stores the next chunk with a flipped bit, and loses the answer."""

    armed = True

    @property
    def capabilities(self) -> Capabilities:
        return UNCHECKED

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        if not self.armed or "/chunks/" not in key:
            return super().put(key, data, mode=mode, checksum=checksum)
        self.armed = False
        stored = bytearray(b"".join(data))
        stored[-1] ^= 1
        super().put(key, [bytes(stored)], mode=mode)
        raise StoreError(f"{key}: the connection broke", transient=True)


def _store(verify_writes: str) -> Store:
    objects = as_promised(FlipsAndForgets(MemoryObjects(f"/{uuid.uuid4().hex}")), UNCHECKED, verify_writes)
    return Store(objects, Descriptor("0" * 32, 0, DigestKind.XXH3_128, UNCHECKED), url="store")


def test_a_put_in_doubt_is_read_back_where_writes_are() -> None:
    store = _store("auto")
    row = store_chunk(store, memoryview(CONTENT))
    assert row.name.generation == 1
    out = memoryview(bytearray(len(CONTENT)))
    fetch(store, row, [(0, out)], "a")
    assert out == CONTENT


def test_a_put_in_doubt_is_believed_where_none_is_read_back() -> None:
    store = _store("never")
    row = store_chunk(store, memoryview(CONTENT))
    with pytest.raises(CorruptionError):
        fetch(store, row, [(0, memoryview(bytearray(len(CONTENT))))], "a")
