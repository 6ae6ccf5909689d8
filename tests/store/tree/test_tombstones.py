"""A writer that saw a path before it was deleted or moved cannot bring it back."""

import os
import uuid

import pytest

from tierfs.errors import ConflictError, NotFoundError
from tierfs.format.manifest import TOMBSTONE_BYTES, Tombstone
from tierfs.objects import MemoryObjects
from tierfs.store import Store, Writer, delete, load, rename, save
from tierfs.store.create import create_store
from tierfs.store.tree.records import observe


@pytest.fixture
def store():
    tier = MemoryObjects(f"/tombstones-{uuid.uuid4().hex}")
    return Store(tier, create_store(tier, "store", random_bytes=os.urandom(16))[0], url="store")


GONE = {"delete": lambda store: delete(store, "a"), "rename": lambda store: rename(store, "a", "b")}


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("there_before", [False, True])
def test_a_writer_that_observed_before_finds_a_conflict(store, how, there_before):
    if there_before:
        save(store, "a", b"first")
    late = Writer(store, "a")
    late.write(b"late")
    save(store, "a", b"second")
    GONE[how](store)
    with pytest.raises(ConflictError, match="version is kept"):
        late.commit()
    with pytest.raises(NotFoundError):
        load(store, "a")


@pytest.mark.parametrize("how", GONE)
def test_a_tombstone_has_one_size(store, how):
    save(store, "a", b"content")
    GONE[how](store)
    observed = observe(store, "a")
    assert isinstance(observed.record, Tombstone)
    assert store.objects.head(observed.key).size == TOMBSTONE_BYTES


@pytest.mark.parametrize("how", GONE)
def test_the_path_can_be_written_again(store, how):
    save(store, "a", b"content")
    GONE[how](store)
    save(store, "a", b"again")
    assert load(store, "a") == b"again"
