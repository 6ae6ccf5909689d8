"""The metadata of a chunk in the local tiers: the envelope that it would have in the object tier, unencoded."""

from __future__ import annotations

from tierfs import digest
from tierfs.errors import CorruptionError
from tierfs.format.envelope import Envelope


def envelope_of(name: bytes, raw_length: int, meta: bytes, tier: str) -> Envelope:
    """Decode the metadata that a tier keeps with a chunk.

    Raises:
        CorruptionError: The metadata is damaged, or belongs to another chunk.
        FormatError: Another version of tierfs wrote it.
    """
    where = f"chunk {name.hex()} in the {tier} tier"
    envelope = Envelope.decode(meta, where, stored_length=len(meta) + raw_length)
    if name[0] == envelope.digest_kind and envelope.digest != name[1:]:
        raise CorruptionError(f"{where} has the metadata of another chunk", tier=tier)
    return envelope


def check_block(envelope: Envelope, index: int, block: memoryview, tier: str) -> None:
    """Verify one block of a chunk.

    Raises:
        CorruptionError: The block is damaged.
    """
    if digest.hash_bytes(envelope.digest_kind, block) != envelope.blocks[index].digest:
        raise CorruptionError(
            f"chunk {envelope.digest.hex()} in the {tier} tier: block {index} is damaged", tier=tier, block=index
        )
