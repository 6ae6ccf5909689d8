"""``store.json``: the description of a store, and the promises of its endpoint.

FORMAT.md, "Descriptor". It is JSON so that a person can read it; its checksum covers the canonical form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, Buffer, DigestKind
from tierfs.errors import CorruptionError, FormatError
from tierfs.format.header import VERSION
from tierfs.format.manifest import INLINE_BYTES_MAX

DESCRIPTOR_BYTES_MAX = 64 * 1024
_MAGIC = "tierfs-store"
_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of an endpoint.

    Attributes:
        conditional_create: A create fails if the object exists, even with concurrent writers.
        conditional_update: An overwrite or delete fails if the current version is not the one it names.
        list_after_write: A listing shows every object whose put was acknowledged before the listing began.
        atomic_put: No reader sees part of an object.
        checksums: Algorithms that the endpoint verifies before it stores; the first is preferred.
        host_local: The objects lie on this host and are lost with it.
    """

    conditional_create: bool
    conditional_update: bool
    list_after_write: bool
    atomic_put: bool
    checksums: tuple[str, ...] = ()
    host_local: bool = False

    @property
    def single_writer(self) -> bool:
        """Whether only one process may write to a store here at a time."""
        return not (self.conditional_create and self.conditional_update and self.list_after_write)

    @property
    def missing(self) -> list[str]:
        """The promises that the endpoint does not keep, in words for a person."""
        words = {
            "conditional creates": self.conditional_create,
            "conditional updates": self.conditional_update,
            "list-after-write": self.list_after_write,
            "atomic puts": self.atomic_put,
            "checksums verified by the server": bool(self.checksums),
        }
        return [word for word, promised in words.items() if not promised]


KEPT_HERE = Capabilities(
    conditional_create=True,
    conditional_update=True,
    list_after_write=True,
    atomic_put=True,
    checksums=("xxh3-128",),
    host_local=True,
)
"""The promises of objects that this host keeps."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The description of a store.

    Attributes:
        uuid: 32 hex digits, made when the store was made.
        created_ns: When the store was made, nanoseconds since the epoch.
        digest_kind: The digests that name contents.
        inline_bytes: Files up to this size lie in their manifest.
        chain_max: Most deltas between a chunk and a chunk that stands alone.
        lease_s: How long a writer may rely on its knowledge without renewing its lease.
        grace_s: How long replaced, deleted and condemned objects stay readable.
        endpoint: The promises of the object tier, from the last probe.
        document: All members as they were read. `encode` writes those again that this version does not know.
    """

    uuid: str
    created_ns: int
    digest_kind: DigestKind
    endpoint: Capabilities
    inline_bytes: int = INLINE_BYTES_MAX
    chain_max: int = 1
    lease_s: int = 60
    grace_s: int = 3600
    document: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def single_writer(self) -> bool:
        """Whether only one process may write at a time."""
        return self.endpoint.single_writer

    def encode(self) -> bytes:
        document: dict[str, object] = {
            **self.document,
            "magic": _MAGIC,
            "format": VERSION,
            "uuid": self.uuid,
            "created_ns": self.created_ns,
            "digest": self.digest_kind.label,
            "block_bytes": BLOCK_BYTES,
            "chunk_bytes": CHUNK_BYTES,
            "inline_bytes": self.inline_bytes,
            "chain_max": self.chain_max,
            "lease_s": self.lease_s,
            "grace_s": self.grace_s,
            "single_writer": self.single_writer,
            "endpoint": asdict(self.endpoint),
        }
        document["checksum"] = digest.checksum(_canonical(document)).hex()
        return (json.dumps(document, indent=2) + "\n").encode()

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Descriptor:
        """Decode ``store.json``.

        Raises:
            CorruptionError: The data is damaged or cut short.
            FormatError: The data is of another version, or has sizes or features that this tierfs does not support.
        """
        try:
            document = parse_object(data, "its text")
        except FormatError as error:
            raise CorruptionError(f"{where}: the store descriptor is damaged: {error}", path=where) from error
        if document.get("magic") != _MAGIC:
            raise CorruptionError(f"{where}: not a store descriptor: damaged, or not written by tierfs", path=where)
        if type(document.get("format")) is not int or document["format"] != VERSION:
            raise FormatError(
                f"{where}: store format {document.get('format')!r}, but this tierfs reads {VERSION}: "
                "use a newer tierfs",
                path=where,
            )
        if document.pop("checksum", None) != digest.checksum(_canonical(document)).hex():
            raise CorruptionError(f"{where}: checksum mismatch: the store descriptor is damaged", path=where)
        return cls._from_document(document, where)

    @classmethod
    def _from_document(cls, document: Mapping[str, object], where: str) -> Descriptor:
        def malformed(what: str) -> FormatError:
            return FormatError(f"{where}: {what}", path=where)

        def number(name: str, low: int, high: int) -> int:
            value = document.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise malformed(f"{name} is {value!r}, and must be from {low} to {high}")
            return value

        if (features := document.get("features", [])) != []:
            raise malformed(
                f"the store has the features {features!r:.200}, which this tierfs lacks: use a newer tierfs"
            )
        number("block_bytes", BLOCK_BYTES, BLOCK_BYTES)
        number("chunk_bytes", CHUNK_BYTES, CHUNK_BYTES)
        uuid = document.get("uuid")
        if not isinstance(uuid, str) or not _UUID.fullmatch(uuid):
            raise malformed(f"invalid uuid {uuid!r}")
        kind = next((kind for kind in DigestKind if kind.label == document.get("digest")), None)
        if kind is None:
            raise malformed(f"unknown digest {document.get('digest')!r}: use a newer tierfs")
        return cls(
            uuid=uuid,
            created_ns=number("created_ns", -(1 << 63), (1 << 63) - 1),
            digest_kind=kind,
            endpoint=_decode_endpoint(document.get("endpoint"), malformed),
            inline_bytes=number("inline_bytes", 0, INLINE_BYTES_MAX),
            chain_max=number("chain_max", 0, 32),
            lease_s=number("lease_s", 1, 3600),
            grace_s=number("grace_s", 1, 365 * 86400),
            document=document,
        )


def _decode_endpoint(value: object, malformed: Callable[[str], FormatError]) -> Capabilities:
    found = value if isinstance(value, dict) else {}
    names = [item.name for item in fields(Capabilities) if item.name != "checksums"]
    flags = {name: flag for name in names if isinstance(flag := found.get(name), bool)}
    checksums = found.get("checksums")
    if len(flags) != len(names) or not isinstance(checksums, list):
        raise malformed(f"invalid endpoint {value!r}")
    return Capabilities(**flags, checksums=tuple(str(name) for name in checksums))


def _canonical(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
