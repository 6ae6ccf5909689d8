"""Making and removing directories, and deleting files."""

from __future__ import annotations

import fsspec
import pytest

from tierfs.errors import AlreadyExistsError, NotFoundError, ReadOnlyError
from tierfs.testing import Fault, FaultyObjects

# -- directories -------------------------------------------------------------------------------------------------


def test_a_directory_that_was_made_is_there_though_it_is_empty(place):
    place.fs.mkdir(place / "d")
    assert place.fs.isdir(place / "d")
    assert place.fs.ls(place / "d") == []
    assert place.fs.ls(place.root, detail=False) == [place / "d"]


@pytest.mark.parametrize("make", ["mkdir", "makedir", "makedirs", "mkdirs"])
@pytest.mark.parametrize("there", ["marker", "implied", "file", "root"])
def test_making_a_directory_where_something_is_is_refused(place, make, there):
    if there == "marker":
        place.fs.mkdir(place / "d")
    elif there == "implied":
        place.fs.pipe(place / "d/a", b"x")
    elif there == "file":
        place.fs.pipe(place / "d", b"x")
    with pytest.raises(FileExistsError):
        getattr(place.fs, make)(place.root if there == "root" else place / "d")


def test_makedirs_may_find_the_directory_there(place):
    place.fs.makedirs(place / "d/e/f", exist_ok=True)
    place.fs.makedirs(place / "d/e/f", exist_ok=True)
    place.fs.makedirs(place / "d", exist_ok=True)
    place.fs.makedirs(place.root, exist_ok=True)
    assert place.fs.isdir(place / "d/e/f")
    assert place.fs.isdir(place / "d")


def test_makedirs_refuses_a_file_even_if_a_directory_may_be_there(place):
    place.fs.pipe(place / "d", b"x")
    with pytest.raises(AlreadyExistsError):
        place.fs.makedirs(place / "d", exist_ok=True)
    assert place.fs.cat(place / "d") == b"x"


def test_mkdir_makes_parents_unless_told_not_to(place):
    place.fs.mkdir(place / "a/b/c")
    assert place.fs.isdir(place / "a/b")
    with pytest.raises(FileNotFoundError):
        place.fs.mkdir(place / "x/y", create_parents=False)
    assert not place.fs.exists(place / "x")
    place.fs.mkdir(place / "x", create_parents=False)
    place.fs.mkdir(place / "x/y", create_parents=False)
    assert place.fs.isdir(place / "x/y")


def test_rmdir_removes_an_empty_directory(place):
    place.fs.mkdir(place / "d")
    place.fs.rmdir(place / "d")
    assert not place.fs.exists(place / "d")
    place.fs.mkdir(place / "d")
    assert place.fs.isdir(place / "d")


def test_rmdir_refuses_a_directory_that_is_not_empty(place):
    place.fs.mkdir(place / "d")
    place.fs.pipe(place / "d/a", b"x")
    with pytest.raises(OSError, match="not empty"):
        place.fs.rmdir(place / "d")
    assert place.names() == ["d/a"]


def test_rmdir_refuses_a_file_and_nothing(place):
    place.fs.pipe(place / "a", b"x")
    for name in ("a", "missing"):
        with pytest.raises(OSError):
            place.fs.rmdir(place / name)
    assert place.names() == ["a"]


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


@pytest.mark.parametrize("remove", ["rm", "rm_file", "delete"])
def test_a_deleted_file_is_gone(place, remove):
    place.fs.pipe({place / "a": b"x", place / "b": b"x"})
    getattr(place.fs, remove)(place / "a")
    assert place.names() == ["b"]
    with pytest.raises(NotFoundError):
        place.fs.cat(place / "a")


@pytest.mark.parametrize("remove", ["rm", "rm_file", "delete"])
def test_deleting_nothing_is_an_error(place, remove):
    with pytest.raises(FileNotFoundError):
        getattr(place.fs, remove)(place / "missing")
    place.fs.pipe(place / "a", b"x")
    place.fs.rm(place / "a")
    with pytest.raises(FileNotFoundError):
        getattr(place.fs, remove)(place / "a")


def test_a_deleted_file_can_be_written_again_as_a_new_one(place):
    place.fs.pipe(place / "a", b"1")
    created = place.fs.created(place / "a")
    place.fs.rm(place / "a")
    place.fs.pipe(place / "a", b"2")
    assert place.fs.cat(place / "a") == b"2"
    assert place.fs.created(place / "a") > created


def test_rm_of_a_list_and_of_a_pattern(place):
    place.fs.pipe({place / name: b"x" for name in ("a1", "a2", "b", "c", "d")})
    place.fs.rm([place / "b", place / "c"])
    place.fs.rm(place / "a*")
    assert place.names() == ["d"]


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


def test_rm_of_a_pattern_that_matches_nothing_is_an_error(place):
    with pytest.raises(FileNotFoundError):
        place.fs.rm(place / "a*")


@pytest.mark.parametrize("made", [True, False])
def test_rm_refuses_a_directory_unless_told_to_go_into_it(place, made):
    if made:
        place.fs.mkdir(place / "d")
    place.fs.pipe(place / "d/a", b"x")
    for path in (place / "d", place.root):
        with pytest.raises(IsADirectoryError, match="recursive"):
            place.fs.rm(path)
    assert place.names() == ["d/a"]


def test_rm_recursive_deletes_all_below_a_directory_and_itself(place):
    place.fs.pipe({place / name: b"x" for name in ("d/a", "d/sub/b", "d/sub/deep/c", "e")})
    place.fs.mkdir(place / "d/empty")
    place.fs.rm(place / "d", recursive=True)
    assert not place.fs.exists(place / "d")
    assert place.fs.find(place.root, withdirs=True) == [place.root, place / "e"]


def test_rm_recursive_of_a_file_deletes_it(place):
    place.fs.pipe({place / "a": b"x", place / "ab": b"x"})
    place.fs.rm(place / "a", recursive=True)
    assert place.names() == ["ab"]


def test_rm_recursive_of_the_root_empties_the_store_which_stays_one(place):
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


def test_a_delete_that_fails_deletes_the_others_and_says_so(place, monkeypatch):
    place.fs.pipe({place / f"d/{number}": b"x" for number in range(5)})
    faulty = FaultyObjects(place.store.objects)
    monkeypatch.setattr(place.store, "_objects", faulty)
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
