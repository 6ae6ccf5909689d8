"""An object tier that is unreachable: how long to ask it, and what the host knows without it.

A save that the flusher is to take down needs the object tier only to look at what it replaces. While that does not
answer, what the host saw last has to do, and whoever asks is not to wait for it again and again.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tierfs.errors import StoreError, TierfsError
from tierfs.format.descriptor import Descriptor
from tierfs.host.private import make_private
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.store.store import Store

__all__ = ["LOOK_S", "KnownStores", "ask_briefly", "within"]

LOOK_S = 5.0
AWAY_S = 30.0
_Answer = TypeVar("_Answer")
_logger = logging.getLogger("tierfs.store")


def within(seconds: float, look: Callable[[], _Answer]) -> _Answer:
    """Ask the object tier, and give up after so many seconds.

    Asked on a thread of its own, which goes on for itself then: on one of those that move chunks it would keep saves from
    going on, and this process from ending.

    Raises:
        StoreError: There was no answer in time; it is transient.
        TierfsError: Raised by ``look``.
    """
    future: concurrent.futures.Future[_Answer] = concurrent.futures.Future()

    def ask() -> None:
        try:
            future.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)

    if start_daemon(ask, name="look") is None:
        ask()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        raise StoreError(
            f"the object tier did not answer within {seconds:g} s", transient=True, tier="object"
        ) from None


def ask_briefly(store: Store, look: Callable[[], _Answer]) -> _Answer:
    """The same for a store with local tiers. One that did not answer is not asked again for half a minute.

    Raises:
        StoreError: There was no answer in time, or none a moment ago; it is transient.
        TierfsError: Raised by ``look``.
    """
    tiers = store.tiers
    assert tiers is not None
    if store.clock.monotonic() < tiers.away_until_s:
        raise StoreError("the object tier did not answer a moment ago", transient=True, tier="object")
    try:
        # A directory of this host is not unreachable, and looked into faster than a thread is started.
        return look() if store.descriptor.endpoint.host_local else within(LOOK_S, look)
    except StoreError as error:
        if error.transient:
            tiers.away_until_s = store.clock.monotonic() + AWAY_S
        raise


class KnownStores:
    """The stores that this host has opened, so that they can be opened while their object tier is unreachable.

    Args:
        directory: The state directory.
        through: The options of the object tier's filesystem: the same URL is another store at another endpoint or account.
            They may hold secrets, so no more of them is kept than a digest.
    """

    def __init__(self, directory: Path, through: str = "") -> None:
        self._directory = directory / "known"
        self._through = through

    def __repr__(self) -> str:
        return f"KnownStores({str(self._directory)!r})"

    def remember(self, url: str, descriptor: Descriptor, places: Sequence[str]) -> None:
        """Note what lies at a root, and where that is. Where it cannot be written the store cannot be opened while it is unreachable."""
        path = self._path(url)
        data = json.dumps({"descriptor": descriptor.encode().decode(), "places": list(places)}).encode()
        try:
            if path.exists() and path.read_bytes() == data:
                return
            make_private(self._directory.parent)
            make_private(self._directory)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.touch(0o600)
            temporary.write_bytes(data)
            temporary.replace(path)
        except (TierfsError, OSError) as error:
            _logger.info("what %s is cannot be kept on this host: %s", url, error)

    def find(self, url: str) -> tuple[Descriptor, tuple[str, ...]] | None:
        """The store at a root when this host looked last, and its places: see `ObjectTier.places`."""
        path = self._path(url)
        try:
            kept = json.loads(path.read_bytes())
            return Descriptor.decode(kept["descriptor"].encode(), str(path)), tuple(map(str, kept["places"]))
        except FileNotFoundError:
            return None
        except (TierfsError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _logger.warning("what this host knows of %s is of no use: %s", url, error)
            return None

    def _path(self, url: str) -> Path:
        name = hashlib.sha256(f"{url}\n{self._through}".encode()).hexdigest()
        return self._directory / f"{name}.json"
