"""Making and removing directories, and deleting files."""

from __future__ import annotations

import fsspec
import pytest

from tierfs.errors import AlreadyExistsError, ReadOnlyError
from tierfs.testing import Fault

# -- directories -------------------------------------------------------------------------------------------------


def test_a_root_and_a_directory_without_a_record_exist(place):
    place.fs.pipe(place / "d/a", b"x")
    for path in (place.root, place / "d"):
        with pytest.raises(AlreadyExistsError):
            place.fs.mkdir(path)
        place.fs.makedirs(path, exist_ok=True)


def test_a_directory_that_was_made_outlives_its_last_file(place):
    place.fs.mkdir(place / "made")
    place.fs.pipe({place / "made/a": b"x", place / "implied/a": b"x"})
    place.fs.rm([place / "made/a", place / "implied/a"])
    assert place.fs.isdir(place / "made")
    assert not place.fs.exists(place / "implied")


REMOVALS = {
    "rm": lambda fs, path: fs.rm(path, recursive=True),
    "rmdir": lambda fs, path: fs.rmdir(path),
    "mv": lambda fs, path: fs.mv(path, f"{path.rsplit('/', 2)[0]}/moved", recursive=True),
}


@pytest.mark.parametrize("make", ["mkdir", "makedirs"])
@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_removing_a_directory_keeps_its_parents(place, make, remove):
    place.fs.pipe(place / "implied/a", b"x")
    for name in ("d/e/n", "implied/n"):
        getattr(place.fs, make)(place / name)
    place.fs.rm(place / "implied/a")
    for name in ("d/e/n", "implied/n"):
        remove(place.fs, place / name)
        assert place.fs.ls(place / name.rpartition("/")[0]) == []


# -- files -------------------------------------------------------------------------------------------------------


def test_a_deleted_file_can_be_written_again_as_a_new_one(place):
    place.fs.pipe(place / "a", b"1")
    created = place.fs.created(place / "a")
    place.fs.rm(place / "a")
    with pytest.raises(FileNotFoundError):
        place.fs.rm(place / "a")
    place.fs.pipe(place / "a", b"2")
    assert place.fs.cat(place / "a") == b"2"
    assert place.fs.created(place / "a") > created


def test_rm_of_a_list_and_of_a_pattern(place):
    place.fs.pipe({place / name: b"x" for name in ("a1", "a2", "b", "c", "d")})
    place.fs.rm([place / "b", place / "c"])
    place.fs.rm(place / "a*")
    assert place.names() == ["d"]
    with pytest.raises(FileNotFoundError):
        place.fs.rm(place / "a*")


@pytest.mark.parametrize("as_list", [False, True])
def test_rm_takes_a_name_with_wildcards_literally(place, as_list):
    place.fs.pipe({place / name: b"x" for name in ("a[1]", "a1", "d[1]/e", "d[1]/f/g", "d1/e", "b1", "b2")})
    for name, options in [("a[1]", {}), ("d[1]", {"recursive": True}), ("b[1]", {})]:
        place.fs.rm([place / name] if as_list else place / name, **options)
    assert place.names() == ["a1", "b2", "d1/e"]
    assert place.fs.expand_path(place / f"[{300 * 'a'}]1") == [place / "a1"]
    place.fs.pipe(place / "a*", b"star")
    assert place.fs.cat(place / "a*") == b"star"
    assert place.fs.expand_path([place / "a*", place / "b*", place / "c*"]) == [place / "a*", place / "b2"]


@pytest.mark.parametrize("made", [True, False])
def test_rm_refuses_a_directory_unless_told_to_go_into_it(place, made):
    if made:
        place.fs.mkdir(place / "d")
    place.fs.pipe(place / "d/a", b"x")
    for path in (place / "d", place.root):
        with pytest.raises(IsADirectoryError, match="recursive"):
            place.fs.rm(path)
    assert place.names() == ["d/a"]


def test_rm_recursive_of_the_root_empties_the_store(place):
    place.fs.pipe({place / "a": b"x", place / "d/b": b"x"})
    place.fs.mkdir(place / "e")
    place.fs.rm(place.root, recursive=True)
    assert place.fs.ls(place.root) == []
    place.fs.pipe(place / "a", b"again")
    assert place.names() == ["a"]


def test_rm_recursive_goes_no_deeper_than_it_is_asked_to(place):
    place.fs.pipe({place / "d/a": b"x", place / "d/sub/b": b"x"})
    with pytest.raises(OSError):
        place.fs.rm(place / "d", recursive=True, maxdepth=1)
    assert place.names() == ["d/sub/b"]


def test_a_delete_that_fails_deletes_the_others_and_says_so(place, faulty):
    place.fs.pipe({place / f"d/{number}": b"x" for number in range(5)})
    faulty.inject(Fault.DENIED, method="put", key_part="d/3")
    with pytest.raises(ReadOnlyError):
        place.fs.rm(place / "d", recursive=True)
    assert place.names() == ["d/3"]


def test_deleting_leaves_the_chunks_to_the_collector(place, random_bytes):
    place.fs.pipe(place / "a", random_bytes(1 << 20, 1))
    chunks = place.chunks()
    place.fs.rm(place / "a")
    assert place.chunks() == chunks


@pytest.mark.parametrize("door", ["fsspec", "text", "compressed", "binary"])
def test_a_delete_after_a_write_has_failed_is_carried_out(place, door):
    fs, _ = fsspec.url_to_fs(place.url)
    fs.pipe(place / "a", b"old")
    doors = {
        "fsspec": lambda: fsspec.open(f"{place.url}/a", "wb"),
        "text": lambda: fs.open(place / "a", "w"),
        "compressed": lambda: fs.open(place / "a", "wb", compression="gzip"),
        "binary": lambda: fs.open(place / "a", "wb"),
    }
    try:
        with doors[door]():
            fs.cat(place / "missing")
    except FileNotFoundError:
        fs.rm(place / "a")
    assert place.names() == []
