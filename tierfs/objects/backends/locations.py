"""How it is told whether two object tiers are the same one: see `ObjectTier.places`."""

from __future__ import annotations

import re

__all__ = ["plain"]

# A password may have an "@" in it, or a slash: what follows a host's colon is a number otherwise.
_NOT_THE_PLACE = re.compile(r"(?<=//)(?:[^/?]*@|[^/?@:]*:(?!\d+(?:/|$))[^?]*@)|\?.*|/$")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def plain(url: str) -> str:
    """An endpoint as all write it who mean it: no user, no password, no query, no port where that is the usual one."""
    scheme, colon, rest = _NOT_THE_PLACE.sub("", url).lower().partition("://")
    host, slash, path = rest.partition("/")
    host = host.removesuffix(_USUAL_PORTS.get(scheme, "/"))
    if host.partition(":")[0] == "localhost":
        host = host.replace("localhost", "127.0.0.1", 1)
    return f"{scheme}{colon}{host}{slash}{path}"
