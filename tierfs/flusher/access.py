"""The flusher's access to the object tier: which of the clients' options it uses, and when it changes them.

Each client sends the options with which it reaches the object tier. The flusher keeps the options in use while the
object tier accepts them. If the object tier refuses them, the flusher uses the newest options that a writer sent, or
else the newest that any client sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tierfs.errors import InvalidInputError, StoreError, StoreNotFoundError, TierfsError

if TYPE_CHECKING:
    # A flusher answers its clients before it loads the store, because loading takes as long as starting.
    from tierfs.flusher.publish import StorePublisher

_Done = TypeVar("_Done")
_logger = logging.getLogger("tierfs.flush")


class Way(NamedTuple):
    """How a process reaches the object tier.

    Attributes:
        url: The store's root.
        options: Options of the filesystem. They include credentials, so do not log them.
        writes: Whether that process has changed the store with these options.
    """

    url: str
    options: dict[str, Any]
    writes: bool = False

    def leads_where(self, other: Way | None) -> bool:
        """Return whether ``other`` has the same URL and options."""
        return other is not None and self[:2] == other[:2]


Connect = Callable[[Way], "StorePublisher"]
"""Makes the publisher for a `Way`. Called when the publisher is needed for the first time."""


class Access:
    """The `Way` to the object tier in use, and the publisher made from it. Thread-safe.

    Args:
        connect: See `Connect`. If ``None``, only `use` gives access.
    """

    def __init__(self, connect: Connect | None = None) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._used: Way | None = None
        self._newest: Way | None = None
        self._is_refused = False
        self._publisher: StorePublisher | None = None
        self._codecs: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is any access to the object tier."""
        return self._used is not None or self._publisher is not None

    def use(self, publisher: StorePublisher) -> None:
        """Use this publisher from now on."""
        with self._lock:
            self._publisher, self._is_refused = publisher, False

    def use_codecs(self, codecs: str) -> None:
        """Let the publisher in use and later ones encode with these codecs."""
        with self._lock:
            if codecs != self._codecs:
                _logger.info("a writer asked for codecs=%s", codecs)
            self._codecs = codecs
            if self._publisher is not None:
                self._publisher.use_codecs(codecs)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def hand_over(self, way: Way) -> bool:
        """Note a client's way. Return whether the way in use has changed."""
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
        """Call ``do`` with the publisher. If the object tier refuses the way and a newer one is known, retry with that.

        Raises:
            StoreError: No client has sent a way yet. Transient.
            TierfsError: Raised by ``do``.
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
        """Return `StorePublisher.asked`, or an empty dict if no publisher has been needed yet."""
        publisher = self._publisher
        return {} if publisher is None else publisher.asked()

    def _loaded(self) -> StorePublisher:
        with self._loading:
            while (publisher := self._publisher) is None:
                way = self._used
                if way is None:
                    raise StoreError("no client has told the flusher yet how to reach the object tier", transient=True)
                assert self._connect is not None
                made = self._connect(way)
                with self._lock:
                    if self._codecs is not None:
                        made.use_codecs(self._codecs)
                    if self._used is not None and way.leads_where(self._used):
                        self._publisher = made
            return publisher

    def _is_replaced(self, publisher: StorePublisher, error: TierfsError) -> bool:
        """Return whether the error is a refusal and another publisher is in use now, so that a retry may succeed."""
        if not _is_refusal(error):
            return False
        with self._lock:
            if publisher is self._publisher:
                self._is_refused = True
                if self._renew():
                    _logger.warning(
                        "the object tier refused the options in use; the flusher tries newer ones: %s", error
                    )
            return publisher is not self._publisher

    def _renew(self) -> bool:
        """Switch to the newest way if it is better. Return whether the way changed. The caller holds the lock."""
        used, newest = self._used, self._newest
        if newest is None or newest.leads_where(used):
            return False
        if used is not None and not self._is_refused and (used.writes or not newest.writes):
            return False
        self._used, self._publisher, self._is_refused = newest, None, False
        return True


def _is_refusal(error: TierfsError) -> bool:
    """Return whether other options may avoid this error: missing rights, expired credentials, a wrong endpoint."""
    is_refused = isinstance(error, (InvalidInputError, StoreNotFoundError)) or getattr(error, "refused", False)
    return is_refused and error.tier in {None, "object"}
