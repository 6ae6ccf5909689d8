"""The flusher's way to the object tier: who handed it over, and when another one takes its place.

Processes say with which options they reach the object tier. Options that work stay, whatever else is handed over. Where the
object tier refuses them, the newest that a writer handed over are used; where no writer did, the newest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tierfs.errors import InvalidInputError, StoreError, StoreNotFoundError, TierfsError

if TYPE_CHECKING:
    # A flusher answers its clients before it loads the store, which takes as long again.
    from tierfs.flusher.publish import StorePublisher

__all__ = ["Access", "Connect", "Way"]

_Done = TypeVar("_Done")
_logger = logging.getLogger("tierfs.flush")


class Way(NamedTuple):
    """How a process reaches the object tier.

    Attributes:
        url: The store's root.
        options: For its filesystem, credentials among them: not to be logged.
        writes: Whether that process has changed something in the store with them.
    """

    url: str
    options: dict[str, Any]
    writes: bool = False

    def leads_where(self, other: Way | None) -> bool:
        """Whether the other one has the same URL and options."""
        return other is not None and self[:2] == other[:2]


Connect = Callable[[Way], "StorePublisher"]
"""Makes what publishes to the store; called when that is needed first."""


class Access:
    """The one way to the object tier that is used. Safe for use by many threads.

    Args:
        connect: See `Connect`; ``None`` where `use` says all that there is.
    """

    def __init__(self, connect: Connect | None = None) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._used: Way | None = None
        self._newest: Way | None = None
        self._is_refused = False
        self._publisher: StorePublisher | None = None

    def __repr__(self) -> str:
        return f"Access(is_known={self.is_known}, is_refused={self._is_refused})"

    @property
    def is_known(self) -> bool:
        """Whether there is a way."""
        return self._used is not None or self._publisher is not None

    def use(self, publisher: StorePublisher) -> None:
        """Publish by this from now on."""
        with self._lock:
            self._publisher, self._is_refused = publisher, False

    def hand_over(self, way: Way) -> bool:
        """Take note of a way. Returns whether it is used from now on, and another one was before, or none."""
        if self._connect is None:
            return False
        with self._lock:
            for known in (self._used, self._newest):
                if way.leads_where(known):
                    way = way._replace(writes=way.writes or (known is not None and known.writes))
            if way.leads_where(self._used):
                self._used = way
            if way.writes or self._newest is None or not self._newest.writes or self._is_refused:
                self._newest = way
            return self._renew()

    def call(self, do: Callable[[StorePublisher], _Done]) -> _Done:
        """Do something with the object tier; once more where the way is refused and a newer one is known.

        Raises:
            StoreError: There is no way yet; it is transient.
            TierfsError: As ``do`` does.
        """
        while True:
            publisher = self._loaded()
            try:
                done = do(publisher)
            except TierfsError as error:
                if not self._is_replaced(publisher, error):
                    raise
            else:
                if self._is_refused:
                    with self._lock:
                        self._is_refused &= publisher is not self._publisher
                return done

    def asked(self) -> dict[str, Any]:
        """See `StorePublisher.asked`; nothing before it was needed."""
        publisher = self._publisher
        return {} if publisher is None else publisher.asked()

    def _loaded(self) -> StorePublisher:
        with self._loading:
            while (publisher := self._publisher) is None:
                way = self._used
                if way is None:
                    raise StoreError("the flusher has no way to the object tier yet", transient=True)
                assert self._connect is not None
                made = self._connect(way)
                with self._lock:
                    if self._used is not None and way.leads_where(self._used):
                        self._publisher = made
            return publisher

    def _is_replaced(self, publisher: StorePublisher, error: TierfsError) -> bool:
        """Whether another way is used by now than the one on which this error came up, which is a refusal."""
        if not _is_refusal(error):
            return False
        with self._lock:
            if publisher is self._publisher:
                self._is_refused = True
                if self._renew():
                    _logger.warning("the object tier refuses the options in use, newer ones are tried: %s", error)
            return publisher is not self._publisher

    def _renew(self) -> bool:
        """Use the newest way where that is better. Returns whether it was not in use. The lock is held."""
        used, newest = self._used, self._newest
        if newest is None or newest.leads_where(used):
            return False
        if used is not None and not self._is_refused and (used.writes or not newest.writes):
            return False
        self._used, self._publisher, self._is_refused = newest, None, False
        return True


def _is_refusal(error: TierfsError) -> bool:
    """Whether others may fare better than who got this: no rights, credentials that have expired, another endpoint."""
    is_refused = isinstance(error, (InvalidInputError, StoreNotFoundError)) or getattr(error, "refused", False)
    return is_refused and error.tier in {None, "object"}
