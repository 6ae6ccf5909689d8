"""A directory that belongs to no store, read through the same doors as one: for checkpoints that lie outside."""

from __future__ import annotations

from tierfs.digest import DigestKind
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.objects.registry import connect
from tierfs.session.url import Location, target_url
from tierfs.store import Store

__all__ = ["plain_store"]

_NOTHING_PROMISED = Capabilities(
    conditional_create=False,
    conditional_update=False,
    list_after_write=False,
    atomic_put=False,
    # Nothing of it is to be kept on this host.
    host_local=True,
)


def plain_store(location: Location) -> tuple[Store, str]:
    """The files around a place, as files of a store that tierfs did not write. To be read only; nothing is looked up yet.

    Args:
        location: A file or directory.

    Returns:
        The store, whose root is the directory that holds it, and its path there.

    Raises:
        InvalidInputError: There is no such filesystem, or it refuses its options.
    """
    above, _, name = location.path.rpartition("/")
    root, path = (above, name) if above else (location.path, "")
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, _NOTHING_PROMISED)
    store = Store(
        connect(location.protocol, root, location.options), descriptor, url=target_url(location.protocol, root)
    )
    return store, path
