"""How it is told whether two object tiers are the same one: see `ObjectTier.places`."""

from __future__ import annotations

import re

__all__ = ["without_secrets"]

_SECRET = re.compile(r"(?<=//)[^/@]*@|\?.*")


def without_secrets(url: str) -> str:
    """A URL without who asks: no user, no password, no query."""
    return _SECRET.sub("", url)
