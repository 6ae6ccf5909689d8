"""The settings of replication to other hosts, and the identity with which a host joins."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierfs.errors import InvalidInputError, StoreError
from tierfs.format.lease import peer_id
from tierfs.host.filesystems import refused
from tierfs.peers.wire import dial

PEERS_MAX = 3
PORT, PORT_MAX = 7946, 65535
IDENTITY_FILE = "peer.pem"
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>\d{1,5}))?")
CALL_S = 2.0
_YEARS = 100


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The number of peers that a host asks for, and the room that it gives to them.

    Attributes:
        count: On how many other hosts each change is held, 1 to 3.
        address: The address to listen at, of one interface.
        port: The TCP port to listen at; 0 for any free one.
        domain: The failure domain of this host; empty for one of its own.
        ram_bytes: Most memory for the changes of other hosts.
        nvme_bytes: Most room on the disk for the changes of other hosts.
        bandwidth: Most bytes per second to other hosts; 0 for no limit.
        hosts: Addresses and ports of the other hosts. If empty, they are found by listing the object tier.
        reads_once: Whether processes of this host read a chunk of the object tier from the host that fetches it for all.
    """

    count: int
    address: str
    port: int = PORT
    domain: str = ""
    ram_bytes: int = 0
    nvme_bytes: int = 0
    bandwidth: int = 0
    reads_once: bool = False
    hosts: tuple[tuple[str, int], ...] = ()

    def arguments(self) -> list[str]:
        listen, hosts = _place(self.address, self.port), ",".join(_place(*each) for each in self.hosts)
        given = {"--peers": self.count, "--peer-listen": listen, "--peer-domain": self.domain, "--peer-hosts": hosts}
        given |= {"--peer-ram": self.ram_bytes, "--peer-nvme": self.nvme_bytes, "--peer-bandwidth": self.bandwidth}
        # The command line refuses an empty argument.
        return [text for name, value in given.items() if value != "" for text in (name, str(value))]


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Return the addresses and ports of ``ADDRESS[:PORT],...``. Raises `InvalidInputError` if it is something else."""
    try:
        return tuple(parse_listen(each) for each in text.split(",") if each.strip())
    except InvalidInputError as error:
        raise InvalidInputError(f"peer_hosts={text!r} is not ADDRESS[:PORT],...") from error


def parse_listen(text: str) -> tuple[str, int]:
    """Return the address and the port of ``ADDRESS[:PORT]``; an IPv6 address stands in brackets.

    Raises:
        InvalidInputError: The text is something else, or names all interfaces.
    """
    match = _ADDRESS.fullmatch(text.strip())
    address = "" if match is None else match["six"] or match["host"]
    port = int(match["port"] or PORT) if match is not None else 0
    if not address or port > PORT_MAX:
        raise InvalidInputError(f"peer_listen={text!r} is not ADDRESS[:PORT]: give the address of one interface")
    if address in {"0.0.0.0", "::", "*"}:  # noqa: S104 - refused
        raise InvalidInputError(
            f"peer_listen={text!r} would listen on all interfaces: give the address of the one that peers reach"
        )
    return address, port


class Identity:
    """The key and the self-signed certificate of this host, kept with the store's local tiers.

    A host that loses its directory becomes another host: its earlier changes are adopted by their holders.

    Args:
        directory: The store's directory on this host.

    Raises:
        InvalidInputError: The package ``cryptography`` is not installed.
        StoreError, ReadOnlyError, CapacityError: The file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / IDENTITY_FILE
        try:
            pem = self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            pem = self._make()
        except OSError as error:
            raise refused(error, self._path, "cannot be read") from error
        try:
            self.certificate = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])
        except ValueError as error:
            raise StoreError(
                f"{self._path} is damaged: remove it, and this host joins its peers as another one",
                path=str(self._path),
            ) from error
        self.id = peer_id(self.certificate)

    def __repr__(self) -> str:
        return f"Identity({self.id})"

    def _make(self) -> str:
        try:
            from cryptography import x509  # noqa: PLC0415 - an extra that only peers need
            from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        except ImportError as error:
            raise InvalidInputError(
                "replication to peers needs the package cryptography: pip install 'tierfs[peers]'"
            ) from error
        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL looks a trusted certificate up by its name, so two hosts must not have the same one.
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"tierfs {serial:040x}")])
        # The clocks of hosts differ, so the certificate is valid long before and after now. Leases bound its use.
        begin = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), serial)
            .not_valid_before(begin)
            .not_valid_after(begin.replace(year=begin.year + _YEARS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = secret + certificate.public_bytes(serialization.Encoding.PEM)
        temporary = self._path.with_suffix(".new")
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            raise refused(error, self._path, "cannot be written") from error
        return pem.decode("ascii")

    def certificate_at(self, address: str, port: int) -> bytes:
        """Return the certificate of the host that answers at an address. It is not known to be a peer.

        Raises:
            OSError: No host answers there.
        """
        context = self.context([], server=False)
        context.verify_mode = ssl.CERT_NONE
        with contextlib.closing(dial(address, port, context, CALL_S)) as connection:
            return connection.certificate

    def context(self, trusted: Iterable[bytes], *, server: bool) -> ssl.SSLContext:
        """Return a context for TLS 1.3 in which both sides prove to have one of these certificates.

        Args:
            trusted: Certificates of other hosts, DER.
            server: Whether this side accepts the connection.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is known, whatever the host's address is
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._path)
        for certificate in trusted:
            context.load_verify_locations(cadata=certificate)
        return context
