"""A reader of a file that was replaced or deleted, and whose chunks were collected since."""

import os
import uuid

import pytest

from tierfs.errors import ConflictError
from tierfs.format import keys
from tierfs.objects import MemoryObjects
from tierfs.store import Store, delete, open_entry, rename, save, stat
from tierfs.store.create import create_store
from tierfs.testing.faults import remove

CHANGES = {
    "replaced": lambda store: save(store, "a", os.urandom(100_000)),
    "deleted": lambda store: delete(store, "a"),
    "renamed": lambda store: rename(store, "a", "b"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_reader_is_told_to_open_the_file_again(change):
    objects = MemoryObjects(f"/replaced-{uuid.uuid4().hex}")
    store = Store(objects, create_store(objects, "store", random_bytes=os.urandom(16))[0], url="store")
    save(store, "a", os.urandom(100_000))
    (row,) = stat(store, "a").manifest.rows
    reader = open_entry(store, stat(store, "a"))
    change(store)
    remove(objects, keys.chunk_key(row.name))
    with pytest.raises(ConflictError, match="open it again"):
        reader.read_into(0, memoryview(bytearray(10)))
