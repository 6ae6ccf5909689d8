"""Invalid names, and strange names that are valid."""

from __future__ import annotations

import pytest

from tierfs.errors import InvalidInputError

BAD = {
    "parent": "d/../a",
    "parent of the root": "../a",
    "self": "d/./a",
    "NUL": "a\0b",
    "private": ".tierfs/x",
    "private root": ".tierfs",
    "component over the limit": "d/" + "x" * 251,
    "component over the limit when encoded": "d/" + "ä" * 42,
    "path over the limit": "/".join(["x" * 200] * 4),
    "no Unicode": "a\udc80b",
}
WRITES = {
    "pipe": lambda fs, path: fs.pipe(path, b"x"),
    "create": lambda fs, path: fs.pipe_file(path, b"x", mode="create"),
    "open": lambda fs, path: fs.open(path, "wb"),
    "append": lambda fs, path: fs.open(path, "ab"),
    "touch": lambda fs, path: fs.touch(path),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "makedirs": lambda fs, path: fs.makedirs(path, exist_ok=True),
    "rm_file": lambda fs, path: fs.rm_file(path),
    "cat": lambda fs, path: fs.cat_file(path),
    "info": lambda fs, path: fs.info(path),
}
STRANGE = [
    " leading and trailing ",
    "...",
    ".hidden",
    "..almost",
    "d/.tierfs",
    ".tierfs-not",
    "percent%20",
    "exclamation!",
    "a!b!",
    "star*",
    "question?",
    "bracket[0]",
    "back\\slash",
    "new\nline",
    "quote'\"",
    "colon:",
    "a::b",
    "tilde~",
    "hash#",
    "ümläut",
    "emoji-🦆",
    "x" * 250,
    "/".join(["x" * 196] * 4),
]


def objects_of(place) -> list[str]:
    return sorted(
        name for name in place.raw.find(place.root) if "/.tierfs/leases" not in name and "/.tierfs/tmp" not in name
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_name_is_refused_and_nothing_is_written(place, kind):
    place.fs.pipe(place / "a", b"x")
    before = objects_of(place)
    for call in WRITES.values():
        with pytest.raises(InvalidInputError, match="bad path"):
            call(place.fs, place / BAD[kind])
    for verb in (place.fs.mv, place.fs.cp_file):
        with pytest.raises(InvalidInputError, match="bad path"):
            verb(place / "a", place / BAD[kind])
    assert objects_of(place) == before
    assert place.fs.cat(place / "a") == b"x"


def test_an_error_about_a_name_is_of_bounded_length(place):
    with pytest.raises(InvalidInputError) as caught:
        place.fs.cat(place / "/".join(["x" * 200] * 1000))
    assert len(str(caught.value)) < 1000


def test_an_empty_part_is_refused_in_memory(memory_place):
    with pytest.raises(InvalidInputError, match="empty part"):
        memory_place.fs.pipe(memory_place / "d//a", b"x")
    assert memory_place.names() == []


def test_an_empty_part_is_dropped_in_a_directory(directory_place):
    directory_place.fs.pipe(directory_place / "d//a", b"x")
    assert directory_place.names() == ["d/a"]
    assert directory_place.fs.cat(directory_place / "d///a") == b"x"


def test_the_root_of_a_store_is_no_file(place):
    for call in ("pipe", "open", "append", "create", "touch"):
        with pytest.raises((IsADirectoryError, InvalidInputError)):
            WRITES[call](place.fs, place.root)
    with pytest.raises(OSError):
        place.fs.cat_file(place.root)
    assert place.names() == []


def test_a_strange_name_is_a_name(place):
    for name in STRANGE:
        path = place / name
        place.fs.pipe_file(path, b"content")
        assert place.fs.cat_file(path) == b"content"
        assert place.names() == [name]
        assert place.fs.info(path)["name"] == path
        assert place.fs.isfile(path)
        place.fs.rm_file(path)
        assert place.names() == []
