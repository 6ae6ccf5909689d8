"""The reference list of a checkpoint: every chunk object that its files need, so that a mark reads one object.

FORMAT.md, "Reference list". The list names the versions of the records that it covers. If the directory now has other
records or versions, the list is ignored and the mark reads the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierfs import digest
from tierfs.digest import Buffer, DigestKind
from tierfs.format.header import Kind, check_writable, header, open_plain, seal
from tierfs.format.keys import name_bytes

RECORDS_MAX = 1_000_000
REFERENCED_MAX = 1_000_000
CHECK_BYTES = 16
PATH_BYTES_MAX = 4096
REFERENCES_BYTES_MAX = RECORDS_MAX * CHECK_BYTES + REFERENCED_MAX * 44 + PATH_BYTES_MAX + 256


def record_check(key: str, version: str) -> bytes:
    """Return a list's entry for one version of one record."""
    return digest.checksum(f"{key}\0{version}".encode())


@dataclass(frozen=True, slots=True)
class ReferenceList:
    """The content of a reference list.

    Attributes:
        path: The checkpoint's directory.
        digest_kind: Kind of the digests.
        records: Checks of the records that the list covers, sorted, laid end to end.
        names: The chunk objects that these records need, encoded as in condemned lists. Sorted, without duplicates,
            laid end to end.
    """

    path: str
    digest_kind: DigestKind
    records: bytes
    names: bytes

    @classmethod
    def of(cls, path: str, kind: DigestKind, checks: Iterable[bytes], names: Iterable[bytes]) -> ReferenceList:
        """Return the list for these record checks and these encoded names, each in any order."""
        return cls(path, kind, b"".join(sorted(checks)), b"".join(sorted(set(names))))

    def encode(self) -> bytes:
        """Return the bytes of the object.

        Raises:
            InvalidInputError: There are more records or names than fit. Such a checkpoint has no list.
        """
        width, path = name_bytes(self.digest_kind), self.path.encode()
        records, names = len(self.records) // CHECK_BYTES, len(self.names) // width
        check_writable(len(path), PATH_BYTES_MAX, "length of the path")
        check_writable(records, RECORDS_MAX, "records in a reference list")
        check_writable(names, REFERENCED_MAX, "chunks in a reference list")
        out = header(Kind.REFERENCES, 0) + bytes((self.digest_kind, 0)) + len(path).to_bytes(2, "little")
        out += records.to_bytes(4, "little") + names.to_bytes(4, "little")
        return seal(b"".join((out, path, self.records, self.names)))

    @classmethod
    def decode(cls, data: Buffer, where: str) -> ReferenceList:
        """Decode a reference list.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.REFERENCES, "a reference list", where)
        digest_kind = cursor.digest_kind()
        cursor.zeros(1)
        path_length = cursor.bounded(2, PATH_BYTES_MAX, "length of the path")
        records = cursor.bounded(4, RECORDS_MAX, "number of records")
        names = cursor.bounded(4, REFERENCED_MAX, "number of chunks")
        path = cursor.text(path_length, "path")
        checks = cursor.bytes(records * CHECK_BYTES)
        found = cls(path, digest_kind, checks, cursor.bytes(names * name_bytes(digest_kind)))
        cursor.finish()
        return found
