"""Listing and inspecting: ls, find, walk, glob, du, info and calls that build on them."""

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


# -- ls ----------------------------------------------------------------------------------------------------------


def test_ls_of_a_directory_lists_what_lies_in_it_sorted(tree):
    assert relative(tree, tree.fs.ls(tree / "dir", detail=False)) == [
        "dir/a.txt", "dir/b.txt", "dir/c.bin", "dir/empty", "dir/sub",
    ]  # fmt: skip


def test_ls_describes_as_info_does(tree):
    described = tree.fs.ls(tree / "dir", detail=True)
    assert [info["type"] for info in described] == ["file", "file", "file", "directory", "directory"]
    for info in described:
        assert tree.fs.info(info["name"]).items() >= info.items()


def test_ls_of_the_root_lists_no_private_objects(tree):
    assert relative(tree, tree.fs.ls(tree.root, detail=False)) == ["dir", "other", "top"]


@pytest.mark.parametrize("detail", [False, True])
def test_ls_of_a_file_lists_the_file(tree, detail):
    (found,) = tree.fs.ls(tree / "top", detail=detail)
    assert found == (tree.fs.info(tree / "top") if detail else tree / "top")


def test_ls_of_an_empty_directory_is_empty(tree):
    assert tree.fs.ls(tree / "dir/empty") == []


def test_ls_of_the_root_of_an_empty_store_is_empty(place):
    assert place.fs.ls(place.root) == []


def test_ls_of_nothing_is_an_error(tree):
    with pytest.raises(NotFoundError):
        tree.fs.ls(tree / "missing")


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_slash_at_the_end_of_a_directory_changes_nothing(tree, slash):
    assert tree.fs.ls(tree / f"dir{slash}") == tree.fs.ls(tree / "dir")
    assert tree.fs.info(tree / f"dir{slash}")["name"] == tree / "dir"
    assert tree.fs.isdir(tree / f"dir{slash}")


def test_deleted_files_are_not_listed(tree):
    tree.fs.rm(tree / "other/e.txt")
    assert relative(tree, tree.fs.ls(tree.root, detail=False)) == ["dir", "top"]
    assert not tree.fs.exists(tree / "other")


def test_a_file_and_a_directory_may_have_the_same_name(place):
    place.fs.pipe(place / "a", b"file")
    place.fs.pipe(place / "a/b", b"below")
    assert place.fs.cat(place / "a") == b"file"
    assert place.fs.cat(place / "a/b") == b"below"
    assert place.names() == ["a", "a/b"]


# -- find, du, walk ----------------------------------------------------------------------------------------------


def test_find_lists_every_file_below(tree):
    assert relative(tree, tree.fs.find(tree.root)) == sorted(TREE)
    assert relative(tree, tree.fs.find(tree / "dir/sub")) == ["dir/sub/a.txt", "dir/sub/deep/d.txt"]


def test_find_with_directories_lists_them_and_its_start(tree):
    assert relative(tree, tree.fs.find(tree / "dir", withdirs=True)) == [
        "dir", "dir/a.txt", "dir/b.txt", "dir/c.bin", "dir/empty", "dir/sub", "dir/sub/a.txt", "dir/sub/deep",
        "dir/sub/deep/d.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, ["top"]), (2, ["dir/a.txt", "dir/b.txt", "dir/c.bin", "other/e.txt", "top"])]
)
def test_find_goes_no_deeper_than_it_is_asked_to(tree, depth, expected):
    assert relative(tree, tree.fs.find(tree.root, maxdepth=depth)) == expected


def test_find_in_detail_describes_as_info_does(tree):
    found = tree.fs.find(tree.root, detail=True)
    assert found == {name: tree.fs.info(name) for name in found}


def test_find_of_a_file_is_the_file_and_of_nothing_nothing(tree):
    assert tree.fs.find(tree / "top") == [tree / "top"]
    assert tree.fs.find(tree / "missing") == []
    assert tree.fs.find(tree / "dir/empty") == []


def test_find_above_every_store_finds_nothing():
    assert fsspec.filesystem("tierfs", target_protocol="memory").find("/") == []


@pytest.mark.parametrize("call", ["find", "walk"])
def test_a_depth_of_nothing_is_refused(tree, call):
    with pytest.raises(ValueError, match="maxdepth"):
        list(getattr(tree.fs, call)(tree.root, maxdepth=0))


def test_du_adds_sizes_up(tree):
    assert tree.fs.du(tree.root) == sum(TREE.values())
    assert tree.fs.du(tree / "dir", maxdepth=1) == 2 + 3 + 4
    assert tree.fs.du(tree / "other", total=False) == {tree / "other/e.txt": 7}
    assert tree.fs.disk_usage(tree / "top") == 1


def walked(place, **arguments):
    return [
        (name[len(place.root) + 1 :], dirs, files) for name, dirs, files in place.fs.walk(place / "dir", **arguments)
    ]


WALK = [
    ("dir", ["empty", "sub"], ["a.txt", "b.txt", "c.bin"]),
    ("dir/empty", [], []),
    ("dir/sub", ["deep"], ["a.txt"]),
    ("dir/sub/deep", [], ["d.txt"]),
]


def test_walk_goes_down(tree):
    assert walked(tree) == WALK


def test_walk_may_begin_at_the_bottom(tree):
    assert walked(tree, topdown=False) == [WALK[1], WALK[3], WALK[2], WALK[0]]


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (2, 3), (3, 4)])
def test_walk_goes_no_deeper_than_it_is_asked_to(tree, depth, count):
    assert walked(tree, maxdepth=depth) == WALK[:count]


def test_walk_in_detail_describes_as_info_does(tree):
    _, dirs, files = next(iter(tree.fs.walk(tree / "dir", detail=True)))
    assert files["a.txt"] == tree.fs.info(tree / "dir/a.txt")
    assert list(dirs) == ["empty", "sub"]


def test_walk_passes_over_directories_that_its_user_takes_out(tree):
    seen = []
    for name, dirs, _ in tree.fs.walk(tree / "dir"):
        seen.append(name)
        dirs[:] = [entry for entry in dirs if entry != "sub"]
    assert relative(tree, seen) == ["dir", "dir/empty"]


def test_walk_of_nothing_is_empty_an_error_or_told_as_asked(tree):
    assert list(tree.fs.walk(tree / "missing")) == []
    with pytest.raises(FileNotFoundError):
        list(tree.fs.walk(tree / "missing", on_error="raise"))
    told = []
    list(tree.fs.walk(tree / "missing", on_error=told.append))
    assert [type(error) for error in told] == [NotFoundError]


# -- glob --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["dir", "other", "top"]),
        ("t?p", ["top"]),
        ("dir/*.txt", ["dir/a.txt", "dir/b.txt"]),
        ("dir/[ac].*", ["dir/a.txt", "dir/c.bin"]),
        ("dir/[!a]*", ["dir/b.txt", "dir/c.bin", "dir/empty", "dir/sub"]),
        ("*/*.txt", ["dir/a.txt", "dir/b.txt", "other/e.txt"]),
        ("**/a.txt", ["dir/a.txt", "dir/sub/a.txt"]),
        ("dir/**/d.txt", ["dir/sub/deep/d.txt"]),
        ("dir/sub/**", ["dir/sub", "dir/sub/a.txt", "dir/sub/deep", "dir/sub/deep/d.txt"]),
        ("dir/", ["dir"]),
        ("top", ["top"]),
        ("missing*", []),
        ("missing/*", []),
    ],
)
def test_glob(tree, pattern, expected):
    assert relative(tree, tree.fs.glob(tree / pattern)) == expected


def test_glob_goes_no_deeper_than_it_is_asked_to(tree):
    assert relative(tree, tree.fs.glob(tree / "dir/**", maxdepth=1)) == [
        "dir", "dir/a.txt", "dir/b.txt", "dir/c.bin", "dir/empty", "dir/sub",
    ]  # fmt: skip


def test_glob_in_detail_describes_as_info_does(tree):
    assert tree.fs.glob(tree / "*/e.txt", detail=True) == {tree / "other/e.txt": tree.fs.info(tree / "other/e.txt")}


def test_expand_path_takes_patterns_and_lists(tree):
    assert relative(tree, tree.fs.expand_path([tree / "dir/[ab]*", tree / "top"])) == ["dir/a.txt", "dir/b.txt", "top"]
    assert relative(tree, tree.fs.expand_path(tree / "dir/sub", recursive=True)) == [
        "dir/sub", "dir/sub/a.txt", "dir/sub/deep", "dir/sub/deep/d.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern", ["*", "**", "d*", "dir/*", "dir/**", "dir/*/a*", "**/deep", "*/", "**/", "dir/su?/*", "[do]*/*"]
)
def test_glob_agrees_with_that_of_the_memory_filesystem(tree, other_memory_root, pattern):
    plain = fsspec.filesystem("memory")
    plain.pipe({f"{other_memory_root}/{name}": b"x" for name in TREE})
    plain.mkdir(f"{other_memory_root}/dir/empty")
    found = [name.replace(other_memory_root, tree.root) for name in plain.glob(f"{other_memory_root}/{pattern}")]
    assert tree.fs.glob(tree / pattern) == found


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


def test_info_of_nothing_is_an_error(tree):
    with pytest.raises(NotFoundError, match="missing"):
        tree.fs.info(tree / "missing")


@pytest.mark.parametrize(
    ("name", "is_dir", "is_file"), [("top", False, True), ("dir", True, False), ("missing", False, False)]
)
def test_info_tells_files_from_directories(tree, name, is_dir, is_file):
    assert tree.fs.isdir(tree / name) is is_dir
    assert tree.fs.isfile(tree / name) is is_file
    assert tree.fs.exists(tree / name) is tree.fs.lexists(tree / name) is (is_dir or is_file)


def test_sizes(tree):
    assert tree.fs.size(tree / "dir/a.txt") == 2
    assert tree.fs.sizes([tree / "top", tree / "dir/b.txt"]) == [1, 3]
    assert tree.fs.size(tree / "dir") == 0


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


def test_times_know_their_zone_and_an_overwrite_changes_one_of_them(place):
    place.fs.pipe(place / "a", b"1")
    created, modified = place.fs.created(place / "a"), place.fs.modified(place / "a")
    assert created.utcoffset() == modified.utcoffset() == dt.timedelta(0)
    place.fs.pipe(place / "a", b"2")
    assert place.fs.created(place / "a") == created
    assert place.fs.modified(place / "a") > modified


def test_an_append_keeps_the_time_of_creation(place):
    place.fs.pipe(place / "a", b"1")
    created = place.fs.created(place / "a")
    with place.fs.open(place / "a", "ab") as file:
        file.write(b"2")
    assert place.fs.created(place / "a") == created


def test_times_of_nothing_and_of_a_directory_that_has_none_are_errors(tree):
    for times in (tree.fs.created, tree.fs.modified):
        with pytest.raises(FileNotFoundError):
            times(tree / "missing")
        with pytest.raises(IsADirectoryError, match="no times"):
            times(tree / "other")
        assert times(tree / "dir/empty").tzinfo is not None


def test_touch_makes_an_empty_file(place):
    place.fs.touch(place / "a")
    assert place.fs.info(place / "a")["size"] == 0


def test_touch_empties_what_is_there(place):
    place.fs.pipe(place / "a", b"content")
    created = place.fs.created(place / "a")
    place.fs.touch(place / "a")
    assert place.fs.cat(place / "a") == b""
    assert place.fs.created(place / "a") == created


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


def test_touch_without_truncating_makes_what_is_not_there(place):
    place.fs.touch(place / "a", truncate=False)
    assert place.fs.cat(place / "a") == b""


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
