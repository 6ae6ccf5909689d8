"""Names of chunk objects, from a cached listing."""

from support.damaging import make_store

from tierfs.format import keys
from tierfs.format.keys import ChunkName
from tierfs.store.maintenance.repair_chunks import ChunkNames

CONTENT, BESIDE, ELSEWHERE = b"\1" * 16, b"\1" * 15 + b"\2", b"\3" * 16


def test_an_object_that_was_stored_since_the_listing_is_found():
    store = make_store()
    for name in (ChunkName(CONTENT), ChunkName(CONTENT, 1), ChunkName(BESIDE)):
        store.objects.put(keys.chunk_key(name), [b"any"])
    names = ChunkNames(store)
    assert names.find(CONTENT) == (ChunkName(CONTENT), ChunkName(CONTENT, 1))
    names.add(ChunkName(CONTENT, 2))
    names.add(ChunkName(CONTENT, 1))
    names.add(ChunkName(ELSEWHERE))
    assert names.find(CONTENT) == (ChunkName(CONTENT), ChunkName(CONTENT, 1), ChunkName(CONTENT, 2))
    assert (names.find(BESIDE), names.find(ELSEWHERE)) == ((ChunkName(BESIDE),), ())
    assert names.find(CONTENT) == (ChunkName(CONTENT), ChunkName(CONTENT, 1))
