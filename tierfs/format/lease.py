"""A writer's lease, and the lists of chunks that garbage collection has condemned.

FORMAT.md, "Lease" and "Condemned list".
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.digest import Buffer, DigestKind
from tierfs.errors import CorruptionError
from tierfs.format.header import Cursor, Kind, check_writable, header, open_sealed, peek_kind, seal
from tierfs.format.keys import ChunkName

__all__ = ["Condemned", "Lease"]

HOST_BYTES_MAX = 255
DURATION_S_MAX = 3600
CONDEMNED_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Lease:
    """A writer's time-bound right to rely on what it knows of the store.

    Attributes:
        holder: 16 random bytes, one id per writing process and store.
        sequence: Counts renewals.
        duration_s: How long it counts from the server's time of the last renewal.
        host: Name of the machine, for people.
        renewed_ns: The writer's own clock at renewal, for people.
    """

    holder: bytes
    sequence: int
    duration_s: int
    host: str
    renewed_ns: int

    def encode(self) -> bytes:
        """The bytes of the lease object."""
        host = self.host.encode()[:HOST_BYTES_MAX].decode(errors="ignore").encode()
        out = header(Kind.LEASE, 0) + self.holder + self.sequence.to_bytes(8, "little")
        out += self.renewed_ns.to_bytes(8, "little", signed=True) + self.duration_s.to_bytes(4, "little")
        return seal(out + len(host).to_bytes(2, "little") + bytes(2) + host)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Lease:
        """Read a lease object.

        Raises:
            CorruptionError: Damaged, cut short, or something else.
            FormatError: Another version, or a field over its limit.
        """
        cursor = _open(data, Kind.LEASE, where)
        holder, sequence, renewed_ns = cursor.bytes(16), cursor.unsigned(8), cursor.signed(8)
        duration_s = cursor.bounded(4, DURATION_S_MAX, "duration")
        host_length = cursor.bounded(2, HOST_BYTES_MAX, "length of the host name")
        cursor.zeros(2)
        host = cursor.text(host_length, "host name")
        cursor.finish()
        return cls(holder, sequence, duration_s, host, renewed_ns)


@dataclass(frozen=True, slots=True)
class Condemned:
    """Chunks that one mark found unreached. Writers treat them as absent from now on.

    Attributes:
        epoch: Number of the mark; grows.
        published_ns: When, nanoseconds since the epoch, for people.
        digest_kind: Kind of the digests.
        names: The chunk objects.
    """

    epoch: int
    published_ns: int
    digest_kind: DigestKind
    names: frozenset[ChunkName]

    def encode(self) -> bytes:
        """The bytes of the list.

        Raises:
            InvalidInputError: More than a million names: publish several epochs.
        """
        check_writable(len(self.names), CONDEMNED_MAX, "condemned chunks in one list")
        out = bytearray(header(Kind.CONDEMNED, 0))
        out += self.epoch.to_bytes(8, "little") + self.published_ns.to_bytes(8, "little", signed=True)
        out += bytes((self.digest_kind, 0, 0, 0)) + len(self.names).to_bytes(4, "little")
        for name in sorted(self.names):
            out += name.digest + name.generation.to_bytes(4, "little") + name.recipe
        return seal(bytes(out))

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Condemned:
        """Read a condemned list.

        Raises:
            CorruptionError: Damaged, cut short, or something else.
            FormatError: Another version, or a field over its limit.
        """
        cursor = _open(data, Kind.CONDEMNED, where)
        epoch, published_ns = cursor.unsigned(8), cursor.signed(8)
        kind = cursor.digest_kind()
        cursor.zeros(3)
        count = cursor.bounded(4, CONDEMNED_MAX, "count")
        if count * (kind.size + 12) != cursor.remaining:
            raise cursor.malformed(f"{count} names do not make {cursor.remaining} bytes")
        names = frozenset(ChunkName(cursor.bytes(kind.size), cursor.unsigned(4), cursor.bytes(8)) for _ in range(count))
        return cls(epoch, published_ns, kind, names)


def _open(data: Buffer, expected: Kind, where: str) -> Cursor:
    kind, word = peek_kind(data, where)
    if kind is not expected:
        raise CorruptionError(f"{where}: a {kind.name.lower()} where a {expected.name.lower()} belongs", path=where)
    cursor = open_sealed(data, where)
    if word:
        raise cursor.malformed(f"unknown flags {word:#x}")
    return cursor
