"""How it is told whether two object tiers are the same one: see `ObjectTier.places`."""

from __future__ import annotations

import re

__all__ = ["plain"]

_NOT_THE_PLACE = re.compile(r"(?<=//)[^/@]*@|\?.*|(?<=\d):80(?=/|$)|:443(?=/|$)|/$")


def plain(url: str) -> str:
    """An endpoint as all write it who mean it: no user, no password, no query, no port where that is the usual one."""
    return _NOT_THE_PLACE.sub("", url).lower().replace("//localhost", "//127.0.0.1")
