"""Descriptions, times and order of what is listed. `test_fs_as_local` compares the names with those of local files."""

from __future__ import annotations

import datetime as dt

import fsspec
import pytest

from tierfs.errors import NotFoundError

TREE = {
    "top": 1,
    "dir/a.txt": 2,
    "dir/b.txt": 3,
    "dir/c.bin": 4,
    "dir/sub/a.txt": 5,
    "dir/sub/deep/d.txt": 6,
    "other/e.txt": 7,
}


@pytest.fixture
def tree(place):
    place.fs.pipe({place / name: bytes(size) for name, size in TREE.items()})
    place.fs.mkdir(place / "dir/empty")
    return place


def relative(place, names) -> list[str]:
    assert all(name.startswith(f"{place.root}/") or name == place.root for name in names)
    return [name[len(place.root) + 1 :] for name in names]


def test_every_listing_describes_as_info_does(tree):
    fs, file = tree.fs, tree / "dir/a.txt"
    assert [info["type"] for info in fs.ls(tree / "dir", detail=True)] == ["file"] * 3 + ["directory"] * 2
    for info in fs.ls(tree / "dir", detail=True):
        assert fs.info(info["name"]).items() >= info.items()
    assert fs.ls(file, detail=True) == [fs.info(file)]
    found = fs.find(tree.root, detail=True)
    assert found == {name: fs.info(name) for name in found}
    assert fs.glob(tree / "*/e.txt", detail=True) == {tree / "other/e.txt": fs.info(tree / "other/e.txt")}
    _, dirs, files = next(iter(fs.walk(tree / "dir", detail=True)))
    assert files["a.txt"] == fs.info(file)
    assert list(dirs) == ["empty", "sub"]


def test_the_root_of_a_store_shows_no_private_objects(place):
    assert place.fs.ls(place.root) == []
    place.fs.pipe({place / "top": b"1", place / "dir/a": b"1"})
    assert relative(place, place.fs.ls(place.root, detail=False)) == ["dir", "top"]


def test_find_above_every_store_finds_nothing():
    assert fsspec.filesystem("tierfs", target_protocol="memory").find("/") == []


def test_walk_goes_down_or_up_in_order(tree):
    down = [
        ("dir", ["empty", "sub"], ["a.txt", "b.txt", "c.bin"]),
        ("dir/empty", [], []),
        ("dir/sub", ["deep"], ["a.txt"]),
        ("dir/sub/deep", [], ["d.txt"]),
    ]
    for options, expected in (({}, down), ({"topdown": False}, [down[1], down[3], down[2], down[0]])):
        walked = [(name[len(tree.root) + 1 :], *rest) for name, *rest in tree.fs.walk(tree / "dir", **options)]
        assert walked == expected


def test_walk_tells_a_function_what_is_missing(tree):
    told = []
    assert list(tree.fs.walk(tree / "missing", on_error=told.append)) == []
    assert [type(error) for error in told] == [NotFoundError]


def test_walk_passes_over_directories_that_its_user_takes_out(tree):
    seen = []
    for name, dirs, _ in tree.fs.walk(tree / "dir"):
        seen.append(name)
        dirs[:] = [entry for entry in dirs if entry != "sub"]
    assert relative(tree, seen) == ["dir", "dir/empty"]


# -- info --------------------------------------------------------------------------------------------------------


def test_info_of_a_file(place, random_bytes):
    before = dt.datetime.now(dt.timezone.utc).timestamp()
    place.fs.pipe(place / "a", random_bytes(17 << 20, 1))
    info = place.fs.info(place / "a")
    assert info.keys() == {"name", "size", "type", "created", "mtime", "digest", "chunks"}
    assert (info["name"], info["size"], info["type"], info["chunks"]) == (place / "a", 17 << 20, "file", 2)
    assert before <= info["created"] == info["mtime"] <= dt.datetime.now(dt.timezone.utc).timestamp()


def test_info_of_directories(tree):
    assert tree.fs.info(tree / "other") == {"name": tree / "other", "size": 0, "type": "directory"}
    assert tree.fs.info(tree.root) == {"name": tree.root, "size": 0, "type": "directory"}
    assert tree.fs.info(tree / "dir/empty").keys() == {"name", "size", "type", "created", "mtime"}


def test_the_full_url_of_a_name_leads_back_to_it(tree):
    for name in (*tree.fs.find(tree.root, withdirs=True), tree.root):
        url = tree.fs.unstrip_protocol(name)
        assert url.startswith(f"{tree.url}")
        assert tree.fs.unstrip_protocol(url) == url
        fs, path = fsspec.url_to_fs(url)
        assert path == name
        assert fs.info(path) == tree.fs.info(name)


# -- content keys and times --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 17 << 20])
def test_ukey_and_checksum_follow_content_alone(place, random_bytes, size):
    data = random_bytes(size, 2)
    place.fs.pipe({place / "a": data, place / "dir/b": data, place / "c": data + b"."})
    for key in (place.fs.ukey, place.fs.checksum):
        assert key(place / "a") == key(place / "dir/b") != key(place / "c")
    before = place.fs.ukey(place / "a"), place.fs.checksum(place / "a")
    place.fs.pipe(place / "a", data + b"!")
    assert before[0] != place.fs.ukey(place / "a")
    assert before[1] != place.fs.checksum(place / "a")


def test_times_know_their_zone_and_a_write_changes_one_of_them(place):
    place.fs.touch(place / "a")
    created, modified = place.fs.created(place / "a"), place.fs.modified(place / "a")
    assert created.utcoffset() == modified.utcoffset() == dt.timedelta(0)
    for mode, data in (("wb", b"1"), ("ab", b"2")):
        with place.fs.open(place / "a", mode) as file:
            file.write(data)
        assert place.fs.created(place / "a") == created
        assert place.fs.modified(place / "a") > modified
    place.fs.touch(place / "a")
    assert place.fs.cat(place / "a") == b""
    assert place.fs.created(place / "a") == created


def test_times_of_paths_without_times_are_errors(tree):
    for times in (tree.fs.created, tree.fs.modified):
        with pytest.raises(FileNotFoundError):
            times(tree / "missing")
        with pytest.raises(IsADirectoryError, match="no times"):
            times(tree / "other")
        assert times(tree / "dir/empty").tzinfo is not None


@pytest.mark.parametrize("size", [10, 17 << 20])
def test_touch_without_truncating_changes_the_time_alone(place, random_bytes, size):
    place.fs.pipe(place / "a", random_bytes(size, 3))
    before, chunks = place.fs.info(place / "a"), place.chunks()
    place.fs.touch(place / "a", truncate=False)
    after = place.fs.info(place / "a")
    assert after["mtime"] > before["mtime"]
    assert {**after, "mtime": before["mtime"]} == before
    assert place.chunks() == chunks
    assert place.fs.cat(place / "a") == random_bytes(size, 3)


# -- a path that is a file and has others below it, as object stores allow ---------------------------------------


@pytest.fixture
def both(place):
    for name in ("run/a", "run/a/b", "run/a/c", "run/a/c/d"):
        place.fs.pipe(place / name, name.encode())
    return place


def test_a_name_that_is_file_and_directory_is_listed_twice(both):
    fs, run = both.fs, both / "run"
    assert [(info["name"], info["type"]) for info in fs.ls(run, detail=True)] == [
        (both / "run/a", "file"), (both / "run/a", "directory"),
    ]  # fmt: skip
    assert relative(both, fs.ls(both / "run/a", detail=False)) == ["run/a/b", "run/a/c", "run/a/c"]
    assert fs.isfile(both / "run/a")
    assert not fs.isdir(both / "run/a")
    assert fs.cat_file(both / "run/a") == b"run/a"


def test_find_walk_and_du_agree_on_it(both):
    fs, run = both.fs, both / "run"
    every = ["run/a", "run/a/b", "run/a/c", "run/a/c/d"]
    assert relative(both, fs.find(run)) == every
    assert relative(both, fs.find(run, withdirs=True)) == ["run", *every]
    assert fs.info(both / "run/a").items() >= fs.find(run, withdirs=True, detail=True)[both / "run/a"].items()
    walked = [f"{top}/{name}" for top, _, names in fs.walk(run) for name in names]
    assert relative(both, sorted(walked)) == every
    assert fs.du(run) == sum(map(len, every))


@pytest.mark.parametrize("top", ["run", "run/a"])
def test_removing_it_recursively_leaves_nothing(both, top):
    both.fs.mkdir(both / "run/a/c/empty")
    both.fs.rm(both / top, recursive=True)
    assert both.fs.find(both / "run", withdirs=True) == []
    assert not both.fs.exists(both / "run")


def test_moving_a_directory_with_it_moves_all_of_it(both):
    both.fs.mv(both / "run", both / "new", recursive=True)
    assert relative(both, both.fs.find(both / "new")) == ["new/a", "new/a/b", "new/a/c", "new/a/c/d"]
    assert not both.fs.exists(both / "run")
