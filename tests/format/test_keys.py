"""Keys of chunks and records: each name has exactly one key, and other keys are rejected."""

from __future__ import annotations

import pytest

from tierfs.digest import DigestKind
from tierfs.errors import FormatError, InvalidInputError
from tierfs.format.keys import (
    CHUNKS,
    TREE,
    ChunkName,
    chunk_key,
    marker_key,
    parse_chunk_key,
    parse_record_key,
    record_key,
)

DIGEST = bytes(range(16))


@pytest.mark.parametrize("name", [ChunkName(DIGEST), ChunkName(DIGEST, 7, b"recipe!!"), ChunkName(DIGEST, 2**32 - 1)])
def test_a_chunk_has_one_key(name: ChunkName) -> None:
    assert parse_chunk_key(chunk_key(name), DigestKind.XXH3_128) == name


@pytest.mark.parametrize(
    "end", [".0.bak", ".00", ".", "", ".-1", f".{2**32}", ".9999999999", f".{2**32}-0123456789abcdef"]
)
def test_malformed_chunk_keys_are_refused(end: str) -> None:
    with pytest.raises(FormatError, match="not the key of a chunk"):
        parse_chunk_key(f"{CHUNKS}00/{DIGEST.hex()}{end}", DigestKind.XXH3_128)


@pytest.mark.parametrize(
    "path",
    ["a", "a/b.c", "run 1/größe", "!", "a!b/!!", "...", "-", "x" * 249, "日本/語", "a/.tierfs", "/".join("a" * 400)],
)
def test_a_path_is_read_back_from_its_key(path: str) -> None:
    assert parse_record_key(record_key(path)) == path
    assert parse_record_key(marker_key(path)) == f"{path}/"


@pytest.mark.parametrize(
    "inside",
    [
        "a",  # not a record
        "a/b",
        "a!b!",  # not an escape
        "!61!",  # an escape of a character that needs none
        "a!2F!",  # not in the canonical case
        "a!2fb!",  # a slash in a name
        "a!00!",
        "!ff!",  # not UTF-8
        ".!",
        "../a!",
        ".tierfs!",
        ".tierfs/a!",
        "/a!",
        "a//b!",
        "x" * 251 + "!",
        "a/" * 400 + "a!",
        "a b!",
    ],
)
def test_malformed_record_keys_are_refused(inside: str) -> None:
    with pytest.raises(FormatError):
        parse_record_key(TREE + inside)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a/../b", r"'\.\.'"),
        ("..", r"'\.\.'"),
        ("a/./b", r"'\.'"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("a\0b", "NUL"),
        (".tierfs/store.json", "store's own"),
        ("x" * 251, "250 bytes"),
        ("/".join(["x" * 200] * 5), "800 bytes"),
        ("ü" * 60, "250 bytes"),
        ("\udc80", "Unicode"),
    ],
)
def test_a_bad_path_has_no_key(path: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        record_key(path)
