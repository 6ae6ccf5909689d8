"""Saving content again over damage stores it again. Other hosts can then read files acknowledged at `object`."""

import os
import uuid

import pytest
from support.saving import Flushing, Training
from support.tiered import save_at

from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.host.pending.levels import Level
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.store import Store, copy, load, rename, save, wait
from tierfs.store.tree.records import observe
from tierfs.testing.faults import flip_bit, remove, truncate

CONTENT = b"".join(os.urandom(BLOCK_BYTES) for _ in range(3)) + b"the last block"


def body(tier, key):
    flip_bit(tier, key, 8 * (tier.head(key).size // 2))


def last_byte(tier, key):
    flip_bit(tier, key, 8 * tier.head(key).size - 1)


def header(tier, key):
    flip_bit(tier, key, 8 * 20)


def magic(tier, key):
    flip_bit(tier, key, 3)


def cut_short(tier, key):
    truncate(tier, key, tier.head(key).size - 1)


def emptied(tier, key):
    truncate(tier, key, 0)


DAMAGES = [body, last_byte, header, magic, cut_short, emptied, remove]


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request):
    return request.param


@pytest.fixture
def tier():
    return MemoryObjects(f"/healing-{uuid.uuid4().hex}")


def open_on(objects):
    return Store(objects, Descriptor("0" * 32, 0, DigestKind.XXH3_128, objects.capabilities), url="store")


def path_of(step):
    return f"run/step_{step}/rank_0.bin"


def chunks_of(store, path):
    return [keys.chunk_key(row.name) for row in observe(store, path).manifest.rows]


def saved_elsewhere(store, tier, path):
    return store, "b"


def saved_over_itself(store, tier, path):
    return store, path


def saved_over_itself_once_more(store, tier, path):
    save(store, path, CONTENT)
    return store, path


def saved_by_another_host(store, tier, path):
    return open_on(tier), path


def saved_elsewhere_by_another_host(store, tier, path):
    return open_on(tier), "b"


def saved_over_a_copy(store, tier, path):
    copy(store, path, "copy")
    return store, "copy"


def saved_over_what_was_renamed(store, tier, path):
    rename(store, path, "moved")
    return store, "moved"


def saved_where_another_host_copied_it(store, tier, path):
    other = open_on(tier)
    copy(other, path, "copy")
    return other, "copy"


@pytest.mark.parametrize(
    "way",
    [
        saved_elsewhere,
        saved_over_itself,
        saved_over_itself_once_more,
        saved_by_another_host,
        saved_elsewhere_by_another_host,
        saved_over_a_copy,
        saved_over_what_was_renamed,
        saved_where_another_host_copied_it,
    ],
)
def test_a_damaged_chunk_that_is_saved_again_is_stored_again(tier, damage, way):
    store = open_on(tier)
    save(store, "a", CONTENT)
    (key,) = chunks_of(store, "a")
    store, path = way(store, tier, "a")
    damage(tier, key)
    save(store, path, CONTENT)
    assert load(open_on(tier), path) == CONTENT


@pytest.mark.parametrize(("codecs", "step"), [("all", 1), ("off", 2)], ids=["the same path", "another path"])
def test_the_flusher_stores_a_damaged_chunk_again(tier, damage, codecs, step):
    flushing, data = Flushing(tier, codecs=codecs), Training(1 << 16).file()
    rows = flushing.save(path_of(1), data)
    damage(tier, keys.chunk_key(rows[-1].name))
    flushing.save(path_of(step), data)
    assert load(flushing.bare(), path_of(step)) == data


@pytest.mark.parametrize("restarted", [False, True], ids=["same flusher", "another flusher"])
def test_a_damaged_chunk_is_no_base(tier, damage, restarted):
    training = Training(1 << 18)
    flushing = Flushing(tier)
    first = flushing.save(path_of(1), training.file())
    if restarted:
        flushing.restart()
    damage(tier, keys.chunk_key(first[-1].name))
    data = training.step().file()
    flushing.save(path_of(2), data)
    assert load(flushing.bare(), path_of(2)) == data


def test_a_delta_whose_base_was_damaged_is_stored_again(tier, damage):
    training = Training(1 << 18)
    flushing = Flushing(tier)
    first = flushing.save(path_of(1), training.file())
    data = training.step().file()
    second = flushing.save(path_of(2), data)
    assert second[-1].bases == (first[-1].name,)
    damage(tier, keys.chunk_key(first[-1].name))
    flushing.save(path_of(3), data)
    assert load(flushing.bare(), path_of(3)) == data


def test_files_at_object_are_readable_elsewhere(host, objects, damage):
    for path in ("a", "b", "a"):
        save_at(host.store, path, CONTENT, Level.STAGED)
        wait(host.store, path, Level.OBJECT)
        assert load(host.plain(), path) == CONTENT
        damage(objects, chunks_of(host.plain(), path)[0])


def test_a_file_saved_over_itself_is_read_back_once(tier):
    measured = MeasuredObjects(tier)
    store = open_on(measured)
    content = 4 * (CONTENT[: 1 << 20] * 16)
    save(store, "a", content)
    gets = []
    for _ in range(3):
        before = measured.snapshot()["get"]["requests"]
        save(store, "a", content)
        gets.append(measured.snapshot()["get"]["requests"] - before)
    assert max(gets) <= 4, "its four chunks are the same, and may be on their way at once"


def test_a_chunk_without_a_local_copy_is_read_back(tier):
    flushing = Flushing(tier, codecs="off")
    rows = flushing.save(path_of(1), CONTENT)
    body(tier, keys.chunk_key(rows[0].name))
    with pytest.raises(CorruptionError, match="no tier holds chunk"):
        flushing.publisher.find_chunk(rows[0])
