"""Keys of chunks: each name has one, and nothing else is one."""

from __future__ import annotations

import pytest

from tierfs.digest import DigestKind
from tierfs.errors import FormatError
from tierfs.format.keys import CHUNKS, ChunkName, chunk_key, parse_chunk_key

DIGEST = bytes(range(16))


@pytest.mark.parametrize("name", [ChunkName(DIGEST), ChunkName(DIGEST, 7, b"recipe!!"), ChunkName(DIGEST, 2**32 - 1)])
def test_a_chunk_has_one_key(name: ChunkName) -> None:
    assert parse_chunk_key(chunk_key(name), DigestKind.XXH3_128) == name


@pytest.mark.parametrize(
    "end", [".0.bak", ".00", ".", "", ".-1", f".{2**32}", ".9999999999", f".{2**32}-0123456789abcdef"]
)
def test_what_is_no_key_of_a_chunk(end: str) -> None:
    with pytest.raises(FormatError, match="no chunk's key"):
        parse_chunk_key(f"{CHUNKS}00/{DIGEST.hex()}{end}", DigestKind.XXH3_128)
