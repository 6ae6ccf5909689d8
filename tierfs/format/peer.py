"""The record by which a host says that it holds changes for others: FORMAT.md, "Peer"."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tierfs.digest import Buffer
from tierfs.format.header import Kind, header, open_plain, seal
from tierfs.format.lease import DURATION_S_MAX

ID_BYTES = 16
TEXT_BYTES_MAX = 255
CERTIFICATE_BYTES_MAX = 4096
PEER_BYTES_MAX = 8192


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
