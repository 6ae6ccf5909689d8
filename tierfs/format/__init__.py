"""Bytes to values and back, with no input or output: the store format of docs/reference/FORMAT.md."""

from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.format.envelope import Base, Block, Envelope
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import Manifest, Record, Row, Tombstone

__all__ = [
    "Base",
    "Block",
    "Capabilities",
    "ChunkName",
    "Condemned",
    "Descriptor",
    "Envelope",
    "Lease",
    "Manifest",
    "Record",
    "Row",
    "Tombstone",
]
