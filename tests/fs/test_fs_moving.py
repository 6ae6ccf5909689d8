"""Moving and copying: manifests move, data does not."""

from __future__ import annotations

import pytest

import tierfs
from tierfs.errors import InvalidInputError, NotFoundError, StoreError
from tierfs.format.manifest import Row
from tierfs.store import stat

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


def test_a_moved_file_keeps_its_times_and_metadata(place):
    with place.fs.open(place / "a", "wb", metadata={"step": 7}) as file:
        file.write(b"x")
    before = place.fs.info(place / "a")
    place.fs.mv(place / "a", place / "b")
    assert place.fs.info(place / "b") == {**before, "name": place / "b"}


def test_a_copy_is_new_and_its_source_is_as_it_was(place):
    place.fs.pipe(place / "a", b"x")
    before = place.fs.info(place / "a")
    place.fs.cp(place / "a", place / "b")
    assert place.fs.info(place / "a") == before
    assert place.fs.created(place / "b") > place.fs.created(place / "a")
    assert place.fs.ukey(place / "b") == place.fs.ukey(place / "a")


@pytest.mark.parametrize("verb", ["mv", "cp"])
def test_moving_or_copying_onto_a_file_replaces_it(place, verb):
    place.fs.pipe({place / "a": b"new", place / "b": b"old"})
    getattr(place.fs, verb)(place / "a", place / "b")
    assert place.fs.cat(place / "b") == b"new"


def test_moving_or_copying_a_file_onto_itself_leaves_it_alone(place):
    place.fs.pipe(place / "a", b"x")
    before = place.fs.info(place / "a")
    place.fs.mv(place / "a", place / "a")
    place.fs.cp_file(place / "a", place / "a")
    assert place.fs.info(place / "a") == before


@pytest.mark.parametrize("verb", ["mv", "cp"])
def test_moving_or_copying_into_a_directory_keeps_the_name(place, verb):
    place.fs.pipe({place / "a": b"x", place / "dir/other": b"y"})
    getattr(place.fs, verb)(place / "a", place / "dir")
    assert place.fs.cat(place / "dir/a") == b"x"


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


def test_moving_a_directory_onto_a_directory_puts_it_inside(place):
    place.fs.pipe({place / "d/1": b"one", place / "e/2": b"two"})
    place.fs.mv(place / "d", place / "e")
    assert place.names() == ["e/2", "e/d/1"]


def test_a_directory_cannot_be_moved_into_itself(place):
    place.fs.pipe(place / "d/1", b"one")
    with pytest.raises(InvalidInputError, match="into itself"):
        place.fs.mv(place / "d", place / "d/new")
    with pytest.raises(InvalidInputError, match="into itself"):
        place.fs.mv(place / "d", place / "d/sub/")
    assert place.names() == ["d/1"]


def test_a_file_written_during_a_move_stays(place, monkeypatch):
    place.fs.pipe({place / "d/1": b"one", place / "d/2": b"two"})
    move = place.fs._mv_now

    def move_late(source, target):
        if source.endswith("/2"):
            place.fs.pipe(place / "d/sub/late", b"late")
        move(source, target)

    monkeypatch.setattr(place.fs, "_mv_now", move_late)
    place.fs.mv(place / "d", place / "e")
    assert place.names() == ["d/sub/late", "e/1", "e/2"]
    assert place.fs.cat(place / "d/sub/late") == b"late"


def test_a_pattern_and_a_list_are_moved_into_a_directory(place):
    place.fs.pipe({place / name: b"x" for name in ("a1", "a2", "b1", "b2", "c")})
    place.fs.mkdir(place / "dir")
    place.fs.mv(place / "a*", place / "dir")
    place.fs.mv([place / "b1", place / "b2"], place / "dir/")
    assert place.names() == ["c", "dir/a1", "dir/a2", "dir/b1", "dir/b2"]


def test_lists_of_the_same_length_are_moved_pair_by_pair(place):
    place.fs.pipe({place / "a": b"a", place / "b": b"b"})
    place.fs.mv([place / "a", place / "b"], [place / "x", place / "y"])
    assert place.fs.cat([place / "x", place / "y"]) == {place / "x": b"a", place / "y": b"b"}


def test_several_files_are_not_moved_onto_one(place):
    place.fs.pipe({place / "a1": b"a", place / "a2": b"b"})
    with pytest.raises(InvalidInputError, match="2 files"):
        place.fs.mv(place / "a*", place / "new")
    assert place.names() == ["a1", "a2"]


@pytest.mark.parametrize("verb", ["mv", "cp", "cp_file", "rename", "move"])
def test_moving_or_copying_nothing_is_an_error(place, verb):
    with pytest.raises(FileNotFoundError):
        getattr(place.fs, verb)(place / "missing", place / "b")
    assert place.names() == []


def test_a_name_with_wildcards_in_it_is_moved_literally(place):
    place.fs.pipe({place / "a[1]": b"x", place / "a1": b"y"})
    place.fs.mv(place / "a[1]", place / "b")
    assert place.names() == ["a1", "b"]


def test_copying_a_directory_copies_all_below_it(place):
    place.fs.pipe({place / "d/1": b"one", place / "d/sub/2": b"two"})
    place.fs.cp(place / "d", place / "e", recursive=True)
    assert place.names() == ["d/1", "d/sub/2", "e/1", "e/sub/2"]


def test_moving_between_stores_moves_the_bytes(place, content, other_memory_root, scratch):
    other = other_memory_root if place.protocol == "memory" else f"{scratch}/other"
    tierfs.init(f"{place.protocol}://{other}")
    place.fs.pipe(place / "a", content)
    place.fs.cp(place / "a", f"{other}/copied")
    place.fs.mv(place / "a", f"{other}/moved")
    assert place.names() == []
    assert place.fs.cat(f"{other}/copied") == place.fs.cat(f"{other}/moved") == content


def test_a_move_that_is_refused_half_way_leaves_both_ends_whole(place, monkeypatch):
    place.fs.pipe({place / "d/1": b"one", place / "d/2": b"two"})
    move = place.fs._mv_now

    def fail_late(source, target):
        if source.endswith("/2"):
            raise StoreError("injected")
        move(source, target)

    monkeypatch.setattr(place.fs, "_mv_now", fail_late)
    with pytest.raises(StoreError):
        place.fs.mv(place / "d", place / "e")
    assert place.names() == ["d/2", "e/1"]
    assert place.fs.cat(place / "d/2") == b"two"


def test_a_file_moved_away_is_not_found_under_its_old_name(place):
    place.fs.pipe(place / "a", b"x")
    place.fs.mv(place / "a", place / "b")
    with pytest.raises(NotFoundError):
        place.fs.cat(place / "a")
