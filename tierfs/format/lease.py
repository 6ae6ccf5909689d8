"""Records that are renewed: a writer's lease, a host's peer record. The lists of chunks that gc has condemned.

FORMAT.md, "Lease", "Peer" and "Condemned list".
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tierfs.digest import Buffer, DigestKind
from tierfs.format.header import Kind, check_writable, header, open_plain, seal
from tierfs.format.keys import ChunkName, name_bytes

HOST_BYTES_MAX = 255
DURATION_S_MAX = 3600
CONDEMNED_MAX = 1_000_000
ID_BYTES = 16
TEXT_BYTES_MAX = 255
CERTIFICATE_BYTES_MAX = 4096
PEER_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Lease:
    """A writer's time-bound right to rely on its knowledge of the store.

    Attributes:
        holder: 16 random bytes, one id per writing process and store.
        sequence: Counts renewals.
        duration_s: How long the lease counts, from the server's time of the last renewal.
        host: Name of the machine, for people.
        renewed_ns: The writer's own clock at renewal, for people.
    """

    holder: bytes
    sequence: int
    duration_s: int
    host: str
    renewed_ns: int

    def encode(self) -> bytes:
        host = self.host.encode()[:HOST_BYTES_MAX].decode(errors="ignore").encode()
        out = header(Kind.LEASE, 0) + self.holder + self.sequence.to_bytes(8, "little")
        out += self.renewed_ns.to_bytes(8, "little", signed=True) + self.duration_s.to_bytes(4, "little")
        return seal(out + len(host).to_bytes(2, "little") + bytes(2) + host)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Lease:
        """Decode a lease object.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.LEASE, "a lease", where)
        holder, sequence, renewed_ns = cursor.bytes(16), cursor.unsigned(8), cursor.signed(8)
        duration_s = cursor.bounded(4, DURATION_S_MAX, "duration")
        host_length = cursor.bounded(2, HOST_BYTES_MAX, "length of the host name")
        cursor.zeros(2)
        host = cursor.text(host_length, "host name")
        cursor.finish()
        return cls(holder, sequence, duration_s, host, renewed_ns)


class NameTable(AbstractSet[ChunkName]):
    """A set of chunk names, kept as encoded bytes. A million names take 28 MB; a Python set takes ten times that.

    Args:
        kind: The digests' kind.
        data: The names, each digest, generation and recipe, laid end to end in any order.
    """

    def __init__(self, kind: DigestKind, data: bytes) -> None:
        self._kind = kind
        self._width = name_bytes(kind)
        self._data = data
        if any(after < before for before, after in itertools.pairwise(self._digests())):
            pieces = [data[at : at + self._width] for at in range(0, len(data), self._width)]
            self._data = b"".join(sorted(pieces))

    def __len__(self) -> int:
        return len(self._data) // self._width

    def __iter__(self) -> Iterator[ChunkName]:
        return (self._at(index) for index in range(len(self)))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, ChunkName):
            return False
        index = bisect.bisect_left(range(len(self)), name.digest, key=self._digest)
        while index < len(self) and self._digest(index) == name.digest:
            if self._at(index) == name:
                return True
            index += 1
        return False

    @property
    def data(self) -> bytes:
        """The names laid end to end, sorted by digest."""
        return self._data

    def _digests(self) -> Iterator[bytes]:
        return map(self._digest, range(len(self)))

    def _digest(self, index: int) -> bytes:
        return self._data[index * self._width : index * self._width + self._kind.size]

    def _at(self, index: int) -> ChunkName:
        return ChunkName.decode(self._data[index * self._width : (index + 1) * self._width])


@dataclass(frozen=True, slots=True)
class Condemned:
    """Chunks that one mark found unreached. Writers treat them as absent once they see the list.

    Attributes:
        epoch: Number of the list; grows.
        published_ns: When the list was published, nanoseconds since the epoch, for people.
        digest_kind: Kind of the digests.
        names: The chunk objects.
    """

    epoch: int
    published_ns: int
    digest_kind: DigestKind
    names: AbstractSet[ChunkName]

    def encode(self) -> bytes:
        """Return the bytes of the list.

        Raises:
            InvalidInputError: There are more than a million names: publish several epochs.
        """
        check_writable(len(self.names), CONDEMNED_MAX, "condemned chunks in one list")
        out = bytearray(header(Kind.CONDEMNED, 0))
        out += self.epoch.to_bytes(8, "little") + self.published_ns.to_bytes(8, "little", signed=True)
        out += bytes((self.digest_kind, 0, 0, 0)) + len(self.names).to_bytes(4, "little")
        if isinstance(self.names, NameTable):
            out += self.names.data
        else:
            for name in sorted(self.names):
                out += name.encode()
        return seal(bytes(out))

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Condemned:
        """Decode a condemned list.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.CONDEMNED, "a condemned list", where)
        epoch, published_ns = cursor.unsigned(8), cursor.signed(8)
        kind = cursor.digest_kind()
        cursor.zeros(3)
        count = cursor.bounded(4, CONDEMNED_MAX, "count")
        if count * name_bytes(kind) != cursor.remaining:
            raise cursor.malformed(f"{count} names do not make {cursor.remaining} bytes")
        return cls(epoch, published_ns, kind, NameTable(kind, cursor.bytes(cursor.remaining)))


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A host that listens for its peers.

    Attributes:
        sequence: Counts renewals, so that each renewal changes the object.
        duration_s: The host counts as gone when it has not renewed the record for this long.
        address: An IP address or a host name.
        port: The TCP port.
        domain: The failure domain, for example a rack; empty for one of the host's own.
        host: Name of the machine, for people.
        certificate: The host's self-signed certificate, DER. Its digest is the host's id.
    """

    sequence: int
    duration_s: int
    address: str
    port: int
    domain: str
    host: str
    certificate: bytes

    @property
    def id(self) -> str:
        """The host's id, 32 hex digits."""
        return peer_id(self.certificate)

    def encode(self) -> bytes:
        """Return the bytes of the object."""
        texts = [text.encode() for text in (self.address, self.domain, self.host)]
        pieces = [*(text[:TEXT_BYTES_MAX].decode(errors="ignore").encode() for text in texts), self.certificate]
        out = header(Kind.PEER, 0) + self.sequence.to_bytes(8, "little") + self.duration_s.to_bytes(4, "little")
        out += self.port.to_bytes(2, "little") + b"".join(len(piece).to_bytes(2, "little") for piece in pieces)
        return seal(out + bytes(2) + b"".join(pieces))

    @classmethod
    def decode(cls, data: Buffer, where: str) -> PeerRecord:
        """Decode the object.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.PEER, "a peer record", where)
        sequence, duration_s = cursor.unsigned(8), cursor.bounded(4, DURATION_S_MAX, "duration")
        port = cursor.unsigned(2)
        lengths = [cursor.bounded(2, TEXT_BYTES_MAX, "length of a text") for _ in range(3)]
        certificate_bytes = cursor.bounded(2, CERTIFICATE_BYTES_MAX, "length of the certificate")
        cursor.zeros(2)
        address, domain, host = (cursor.text(length, "text") for length in lengths)
        certificate = cursor.bytes(certificate_bytes)
        cursor.finish()
        return cls(sequence, duration_s, address, port, domain, host, certificate)


def peer_id(certificate: bytes) -> str:
    """Return the id of the host with this certificate: the first half of its SHA-256, in hex."""
    return hashlib.sha256(certificate).hexdigest()[: 2 * ID_BYTES]
