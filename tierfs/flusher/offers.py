"""The ways to the object tier that clients offer, as one: one that works stays, and where it is refused the others are tried.

Whoever asks how a store is doing offers what it has itself, which may be less than what is needed to write; whoever writes
may renew its credentials; and a store that was moved is found where it is now by who opened it there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreNotFoundError,
    TierfsError,
)
from tierfs.format.manifest import Row
from tierfs.host.pending.publisher import Fill, Hint, Publisher, ReadRow
from tierfs.host.pending.record import Draft

__all__ = ["OFFERS_MAX", "Offers"]

OFFERS_MAX = 4
_KNOWN_MAX = 1024
# What only who is let in gets to hear.
_ANSWERS = (AlreadyExistsError, CapacityError, ConflictError, CorruptionError, NotFoundError)
_Done = TypeVar("_Done")
_logger = logging.getLogger("tierfs.flush")


class _Offer(NamedTuple):
    way: dict[str, Any]
    publisher: Publisher


class _GoneError(Exception):
    """A chunk's bytes are not there: that says nothing of a way to the object tier."""


class Offers:
    """See `tierfs.host.pending.publisher.Publisher`. Holds `OFFERS_MAX` ways at most; at least one before it is used.

    Args:
        connect: Makes the way to the object tier from what a client sends of it; must not block.
    """

    def __init__(self, connect: Callable[[dict[str, Any]], Publisher]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._offers: tuple[_Offer, ...] = ()  # the one that worked last, then the newest first
        self._known: dict[bytes, None] = {}  # digests of all that were ever offered, the oldest first
        self._is_refused = False

    def __repr__(self) -> str:
        return f"Offers({len(self._offers)}/{OFFERS_MAX})"

    def add(self, offered: Sequence[dict[str, Any]]) -> bool:
        """Take up what a client sends, the newest first, behind what worked last.

        Returns whether some were never offered before: those that gave way to others, and come again, do not count.
        """
        digests = [_digest(way) for way in offered]
        with self._lock:
            held = [offer.way for offer in self._offers]
            come = [_Offer(way, self._connect(way)) for way in offered if way not in held]
            self._offers = (*self._offers[:1], *come, *self._offers[1:])[:OFFERS_MAX]
            has_new = any(digest not in self._known for digest in digests)
            self._known |= dict.fromkeys(digests)
            for digest in list(self._known)[:-_KNOWN_MAX]:
                del self._known[digest]
        return has_new

    def plan(self, draft: Draft, read: ReadRow) -> Sequence[Hint]:
        """See `Publisher.plan`."""
        return self._try(lambda publisher: publisher.plan(draft, read))

    def put_chunk(
        self,
        length: int,
        fill: Fill,
        hint: Hint,
        rows: Sequence[Row | None],
        *,
        read: ReadRow,
        pace: Callable[[int], None],
    ) -> Row | None:
        """See `Publisher.put_chunk`."""

        def put(publisher: Publisher) -> Row:
            row = publisher.put_chunk(length, fill, hint, rows, read=read, pace=pace)
            if row is None:
                raise _GoneError
            return row

        try:
            return self._try(put)
        except _GoneError:
            return None

    def find_chunk(self, row: Row) -> Row:
        """See `Publisher.find_chunk`."""
        return self._try(lambda publisher: publisher.find_chunk(row))

    def publish(self, draft: Draft, rows: Sequence[Row], *, read: ReadRow) -> None:
        """See `Publisher.publish`."""
        self._try(lambda publisher: publisher.publish(draft, rows, read=read))

    def distrust(self, key: str) -> None:
        """See `Publisher.distrust`."""
        self._try(lambda publisher: publisher.distrust(key))

    def asked(self) -> dict[str, Any]:
        """See `Publisher.asked`: of the one that worked last."""
        return self._offers[0].publisher.asked()

    def _try(self, do: Callable[[Publisher], _Done]) -> _Done:
        refusal: TierfsError | None = None
        failure: TierfsError | None = None
        tried: list[Publisher] = []
        try:
            # Some may come meanwhile.
            while offer := next((each for each in self._offers if each.publisher not in tried), None):
                tried.append(offer.publisher)
                try:
                    done = do(offer.publisher)
                except TierfsError as error:
                    if _is_refusal(error):
                        refusal = refusal or error
                    elif refusal is not None and _is_of_objects(error) and getattr(error, "transient", False):
                        failure = failure or error  # it may work yet, and so may the next one now
                    else:
                        if _is_of_objects(error) and isinstance(error, _ANSWERS):
                            self._works(offer)
                        raise
                else:
                    self._works(offer)
                    return done
            assert refusal is not None
            if failure is not None:
                raise failure
            self._note(refusal)
            raise refusal
        finally:
            del refusal, failure  # they hold this frame, which would hold them, and all that was lent, until collected

    def _works(self, offer: _Offer) -> None:
        if self._offers[0] is offer and not self._is_refused:
            return
        with self._lock:
            self._offers = (offer, *(other for other in self._offers if other is not offer))[:OFFERS_MAX]
            self._is_refused = False

    def _note(self, refusal: TierfsError) -> None:
        with self._lock:
            if not self._is_refused:
                self._is_refused = True
                words = "the object tier refuses whatever clients sent so far (%d ways): %s; credentials that"
                words += " are renewed in the environment reach the next flusher: tierfs flusher stop URL"
                _logger.warning(words, len(self._offers), refusal)


def _digest(way: dict[str, Any]) -> bytes:
    text = json.dumps(way, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).digest()


def _is_refusal(error: TierfsError) -> bool:
    """Whether others may fare better than who got this: no rights, credentials that have expired, another endpoint."""
    is_refused = isinstance(error, (InvalidInputError, StoreNotFoundError)) or getattr(error, "refused", False)
    return is_refused and _is_of_objects(error)


def _is_of_objects(error: TierfsError) -> bool:
    return error.tier in {None, "object"}
