"""Choices of bases: a chunk is encoded only against chunks that readers can read."""

import struct

import pytest

from tierfs import digest
from tierfs.codec import Codec
from tierfs.digest import DigestKind
from tierfs.errors import InvalidInputError
from tierfs.format.envelope import BASES_MAX
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row, encode_rows
from tierfs.store.encode.encoder import Encoder
from tierfs.store.encode.pipeline import Codecs, SourcePiece
from tierfs.store.encode.tensors import ChunkContext

KIND = DigestKind.XXH3_128


def named(number):
    return ChunkName(number.to_bytes(16, "big"))


def delta(number, raw):
    """Return the row of a chunk that is encoded against another one."""
    name = digest.combine(KIND, len(raw), [digest.hash_bytes(KIND, raw)])
    return Row(ChunkName(name, 0, b"recipe.."), len(raw), 200, (named(number),))


@pytest.mark.parametrize(("count", "derived"), [(BASES_MAX // 2, True), (BASES_MAX // 2 + 1, False)])
def test_a_chunk_is_derived_only_where_a_row_can_name_all_that_it_takes_to_read_it(count, derived):
    wide = [struct.pack("<4f", *range(number, number + 4)) for number in range(count)]
    narrow = b"".join(struct.pack("<H", struct.unpack("<I", wide[n][at : at + 4])[0] >> 16)
                      for n in range(count) for at in range(0, 16, 4))  # fmt: skip
    rows = [delta(number, raw) for number, raw in enumerate(wide)]
    held = {row.name: raw for row, raw in zip(rows, wide, strict=True)}

    class Held:
        def read_source(self, row, out):
            out[:] = held[row.name]
            return True

    encoder = Encoder(Codecs.parse("all"), is_near=True)
    sources = [SourcePiece(row, 0, row.raw_length) for row in rows]
    raw = memoryview(bytearray(narrow))
    encoded = encoder.encode(raw, ChunkContext(), sources, into=raw, bases=Held())
    assert ([block.codec for block in encoded.blocks] == [Codec.DERIVE]) is derived
    assert len(encoded.needs) == (2 * count if derived else 0)
    encode_rows((Row(named(1), len(narrow), 300, encoded.needs),))


def test_a_row_that_no_reader_takes_is_not_written():
    with pytest.raises(InvalidInputError):
        encode_rows((Row(named(1), 1, 300, tuple(map(named, range(BASES_MAX + 1)))),))
