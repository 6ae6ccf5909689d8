"""The error by which the decoders report wrong bytes."""

from __future__ import annotations


class DamageError(Exception):
    """Encoded bytes break a rule of FORMAT.md. `decode_block` adds their place and raises `CorruptionError`."""
