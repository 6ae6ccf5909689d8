"""Normalize the names of endpoints, to tell whether two object tiers are the same: see `ObjectTier.places`."""

from __future__ import annotations

import re

# A password may contain "@" or a slash. Without a password, a port number follows the host's colon.
_NOT_THE_PLACE = re.compile(r"(?<=//)(?:[^/?]*@|[^/?@:]*:(?!\d+(?:/|$))[^?]*@)|\?.*|/$")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def plain(url: str) -> str:
    """Normalize an endpoint's URL: lower case, and no user, password, query, final slash or default port.

    ``localhost`` becomes 127.0.0.1.
    """
    scheme, colon, rest = _NOT_THE_PLACE.sub("", url).lower().partition("://")
    host, slash, path = rest.partition("/")
    host = host.removesuffix(_USUAL_PORTS.get(scheme, "/"))
    if host.partition(":")[0] == "localhost":
        host = host.replace("localhost", "127.0.0.1", 1)
    return f"{scheme}{colon}{host}{slash}{path}"
