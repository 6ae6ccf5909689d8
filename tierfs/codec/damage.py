"""How the decoders say that encoded bytes are wrong."""

from __future__ import annotations

__all__ = ["DamageError"]


class DamageError(Exception):
    """Encoded bytes that break a rule of FORMAT.md; `decode_block` adds where they lie."""
