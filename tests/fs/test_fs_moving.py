"""Moving and copying: manifests move, data does not."""

from __future__ import annotations

import pytest

import tierfs
from tierfs.errors import InvalidInputError, ReadOnlyError
from tierfs.format.keys import record_key
from tierfs.format.manifest import Row
from tierfs.objects import WrappedObjects
from tierfs.store import stat
from tierfs.testing import Fault

CHUNK = 16 << 20


def rows(place, name) -> tuple[Row, ...]:
    manifest = stat(place.store, name).manifest
    assert manifest is not None
    return manifest.rows


@pytest.fixture
def content(random_bytes) -> bytes:
    return random_bytes(2 * CHUNK + 100, 1)


@pytest.mark.parametrize("verb", ["mv", "cp"])
def test_moving_or_copying_a_file_puts_one_manifest_and_no_chunk(place, content, verb):
    place.fs.pipe(place / "a", content)
    chunks, chunk_rows, before = place.chunks(), rows(place, "a"), place.requests()
    getattr(place.fs, verb)(place / "a", place / "b")
    after = place.requests()
    assert after["put"] - before["put"] == (2 if verb == "mv" else 1)  # the tombstone of the old path
    assert after["get"] == before["get"]
    assert place.chunks() == chunks
    assert rows(place, "b") == chunk_rows
    assert place.fs.cat(place / "b") == content
    assert place.fs.exists(place / "a") == (verb == "cp")


def test_a_moved_file_keeps_its_times_and_a_copy_is_new(place):
    with place.fs.open(place / "a", "wb", metadata={"step": 7}) as file:
        file.write(b"x")
    before = place.fs.info(place / "a")
    place.fs.mv(place / "a", place / "a")
    place.fs.cp_file(place / "a", place / "a")
    place.fs.mv(place / "a", place / "b")
    assert place.fs.info(place / "b") == {**before, "name": place / "b"}
    place.fs.cp(place / "b", place / "c")
    assert place.fs.info(place / "b") == {**before, "name": place / "b"}
    assert place.fs.created(place / "c") > place.fs.created(place / "b")
    assert place.fs.ukey(place / "c") == place.fs.ukey(place / "b")


@pytest.mark.parametrize("verb", ["mv", "cp"])
def test_a_slash_at_the_end_makes_the_target_a_directory(place, verb):
    place.fs.pipe(place / "a", b"x")
    getattr(place.fs, verb)(place / "a", place / "dir/")
    assert place.fs.cat(place / "dir/a") == b"x"


def test_moving_a_directory_moves_all_below_it(place, content):
    files = {"d/1": b"one", "d/sub/2": b"two", "d/sub/deep/3": content}
    place.fs.pipe({place / name: data for name, data in files.items()})
    place.fs.mkdir(place / "d/empty")
    chunks = place.chunks()
    place.fs.mv(place / "d", place / "e")
    assert not place.fs.exists(place / "d")
    assert place.names() == ["e/1", "e/sub/2", "e/sub/deep/3"]
    assert {name: place.fs.cat(place / f"e{name[1:]}") for name in files} == files
    assert place.fs.isdir(place / "e/empty")
    assert place.chunks() == chunks


def test_a_directory_cannot_be_moved_into_itself(place):
    place.fs.pipe(place / "d/1", b"one")
    with pytest.raises(InvalidInputError, match="into itself"):
        place.fs.mv(place / "d", place / "d/new")
    with pytest.raises(InvalidInputError, match="into itself"):
        place.fs.mv(place / "d", place / "d/sub/")
    assert place.names() == ["d/1"]


def test_a_file_written_during_a_move_stays(place, put_between):
    place.fs.pipe({place / "d/1": b"one", place / "d/2": b"two"})

    class Busy(WrappedObjects):
        def put(self, key, *arguments, **options):
            if key == record_key("e/2"):
                place.fs.pipe(place / "d/sub/late", b"late")
            return super().put(key, *arguments, **options)

    put_between(Busy)
    place.fs.mv(place / "d", place / "e")
    assert place.names() == ["d/sub/late", "e/1", "e/2"]
    assert place.fs.cat(place / "d/sub/late") == b"late"


def test_a_pattern_and_a_list_are_moved_into_a_directory(place):
    place.fs.pipe({place / name: b"x" for name in ("a1", "a2", "b1", "b2", "c", "c[1]", "c1")})
    place.fs.mkdir(place / "dir")
    place.fs.mv(place / "a*", place / "dir")
    place.fs.mv([place / "b1", place / "b2"], place / "dir/")
    place.fs.mv(place / "c[1]", place / "literal")
    assert place.names() == ["c", "c1", "dir/a1", "dir/a2", "dir/b1", "dir/b2", "literal"]


def test_lists_of_the_same_length_are_moved_pair_by_pair(place):
    place.fs.pipe({place / "a": b"a", place / "b": b"b"})
    place.fs.mv([place / "a", place / "b"], [place / "x", place / "y"])
    assert place.fs.cat([place / "x", place / "y"]) == {place / "x": b"a", place / "y": b"b"}


def test_several_files_are_not_moved_onto_one(place):
    place.fs.pipe({place / "a1": b"a", place / "a2": b"b"})
    with pytest.raises(InvalidInputError, match="2 files"):
        place.fs.mv(place / "a*", place / "new")
    assert place.names() == ["a1", "a2"]


def test_moving_between_stores_moves_the_bytes(place, content, other_memory_root, scratch):
    other = other_memory_root if place.protocol == "memory" else f"{scratch}/other"
    tierfs.init(f"{place.protocol}://{other}")
    place.fs.pipe(place / "a", content)
    place.fs.cp(place / "a", f"{other}/copied")
    place.fs.mv(place / "a", f"{other}/moved")
    assert place.names() == []
    assert place.fs.cat(f"{other}/copied") == place.fs.cat(f"{other}/moved") == content


def test_a_move_that_is_refused_half_way_leaves_both_ends_whole(place, faulty):
    place.fs.pipe({place / "d/1": b"one", place / "d/2": b"two"})
    faulty.inject(Fault.DENIED, method="put", key_part="e/2")
    with pytest.raises(ReadOnlyError):
        place.fs.mv(place / "d", place / "e")
    assert place.names() == ["d/2", "e/1"]
    assert place.fs.cat(place / "d/2") == b"two"
