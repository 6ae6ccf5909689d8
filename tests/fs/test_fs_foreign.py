"""Files in a store's directory that tierfs did not write: shown, read, never changed."""

from __future__ import annotations

import pytest

from tierfs.errors import ConflictError, ReadOnlyError

DATA = bytes(range(256)) * 100


@pytest.fixture
def foreign(place):
    """The place, with some foreign files and one that tierfs wrote."""
    place.raw.pipe({place / "theirs": DATA, place / "data/deep/theirs.txt": b"text\n"})
    place.fs.pipe(place / "data/ours", b"ours")
    return place


def test_they_are_listed_beside_ours(foreign):
    assert foreign.names() == ["data/deep/theirs.txt", "data/ours", "theirs"]
    assert foreign.fs.ls(foreign / "data", detail=False) == [foreign / "data/deep", foreign / "data/ours"]
    assert foreign.fs.glob(foreign / "**/their*") == [foreign / "data/deep/theirs.txt", foreign / "theirs"]
    assert foreign.fs.du(foreign.root) == len(DATA) + 9


def test_they_are_described_as_somebody_else_s(foreign):
    info = foreign.fs.info(foreign / "theirs")
    assert (info["type"], info["size"], info["foreign"]) == ("file", len(DATA), True)
    assert foreign.fs.ls(foreign / "theirs") == [info]
    assert foreign.fs.modified(foreign / "theirs").tzinfo is not None
    assert foreign.fs.isfile(foreign / "theirs")
    assert "foreign" not in foreign.fs.info(foreign / "data/ours")


def test_they_are_read_whole_and_in_part(foreign, tmp_path):
    fs, path = foreign.fs, foreign / "theirs"
    assert fs.cat(path) == DATA
    assert fs.cat_file(path, 10, 20) == DATA[10:20]
    assert fs.cat_file(path, -10) == DATA[-10:]
    assert fs.cat_ranges([path, foreign / "data/ours"], 1, 3) == [DATA[1:3], b"ur"]
    with fs.open(path) as file:
        file.seek(1000)
        assert file.read(5) == DATA[1000:1005]
    fs.get(path, str(tmp_path / "local"))
    assert (tmp_path / "local").read_bytes() == DATA
    assert fs.read_text(foreign / "data/deep/theirs.txt") == "text\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda fs, path: fs.pipe(path, b"new"),
        lambda fs, path: fs.open(path, "wb"),
        lambda fs, path: fs.open(path, "ab"),
        lambda fs, path: fs.touch(path),
        lambda fs, path: fs.rm(path),
        lambda fs, path: fs.rm_file(path),
        lambda fs, path: fs.mv(path, f"{path}-moved"),
        lambda fs, path: fs.mv(path.replace("theirs", "data/ours"), path),
        lambda fs, path: fs.cp(path.replace("theirs", "data/ours"), path),
    ],
    ids=["pipe", "wb", "ab", "touch", "rm", "rm_file", "mv away", "mv onto", "cp onto"],
)
def test_changing_one_is_refused(foreign, change):
    with pytest.raises(PermissionError, match="not written by tierfs") as caught:
        change(foreign.fs, foreign / "theirs")
    assert isinstance(caught.value, ReadOnlyError)
    assert foreign.raw.cat(foreign / "theirs") == DATA
    assert foreign.names() == ["data/deep/theirs.txt", "data/ours", "theirs"]


def test_an_exclusive_create_finds_one_in_its_place(foreign):
    with pytest.raises(FileExistsError):
        foreign.fs.pipe_file(foreign / "theirs", b"new", mode="create")
    with pytest.raises(FileExistsError):
        foreign.fs.open(foreign / "theirs", "xb")
    assert foreign.raw.cat(foreign / "theirs") == DATA


def test_a_directory_of_theirs_is_not_removed_with_ours(foreign):
    with pytest.raises(PermissionError):
        foreign.fs.rm(foreign / "data", recursive=True)
    assert foreign.names() == ["data/deep/theirs.txt", "theirs"]


def test_a_copy_of_one_is_ours(foreign):
    foreign.fs.cp(foreign / "theirs", foreign / "copy")
    foreign.raw.rm(foreign / "theirs")
    assert foreign.fs.cat(foreign / "copy") == DATA
    assert "foreign" not in foreign.fs.info(foreign / "copy")
    foreign.fs.rm(foreign / "copy")


def test_a_foreign_file_that_changes_during_a_read_is_an_error(foreign):
    with foreign.fs.open(foreign / "theirs") as file:
        foreign.raw.pipe(foreign / "theirs", DATA[::-1])
        with pytest.raises(ConflictError, match="changed"):
            file.read()


def test_a_new_version_is_seen_at_once(foreign):
    before = foreign.fs.ukey(foreign / "theirs")
    foreign.raw.pipe(foreign / "theirs", b"shorter")
    assert foreign.fs.cat(foreign / "theirs") == b"shorter"
    assert foreign.fs.ukey(foreign / "theirs") != before


def test_a_later_foreign_file_of_the_same_name_is_hidden(foreign):
    foreign.raw.pipe(foreign / "data/ours", b"theirs, later")
    assert foreign.fs.cat(foreign / "data/ours") == b"ours"
    assert foreign.fs.info(foreign / "data/ours")["size"] == 4
    assert foreign.names("data").count("data/ours") == 1


def test_a_directory_that_holds_theirs_alone_is_a_directory(foreign):
    assert foreign.fs.isdir(foreign / "data/deep")
    assert foreign.fs.find(foreign / "data/deep") == [foreign / "data/deep/theirs.txt"]
    with pytest.raises(FileExistsError):
        foreign.fs.mkdir(foreign / "data/deep")
