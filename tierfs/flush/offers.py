"""The ways to the object tier that clients offer, as one: one that works stays, and where it is refused the others are tried.

Whoever asks how a store is doing offers what it has itself, which may be less than what is needed to write; and whoever
writes may renew its credentials.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tierfs.clock import Clock
from tierfs.errors import CapacityError, ConflictError, CorruptionError, ReadOnlyError, StoreError, TierfsError
from tierfs.flush.draft import Draft
from tierfs.flush.publisher import Hint, Publisher, ReadRow
from tierfs.format.manifest import Row

__all__ = ["OFFERS_MAX", "Offers"]

OFFERS_MAX = 4
REFUSED_S = 2.0  # from the first refusal until it is not to be expected any more that one of them works
_Done = TypeVar("_Done")
_logger = logging.getLogger("tierfs.flush")


class _Offer(NamedTuple):
    options: dict[str, Any]
    publisher: Publisher


class Offers:
    """See `tierfs.flush.publisher.Publisher`. Holds `OFFERS_MAX` ways at most; at least one before it is used.

    Args:
        connect: Makes the way to the object tier from the options that a client sends; must not block.
        clock: Where time comes from.
    """

    def __init__(self, connect: Callable[[dict[str, Any]], Publisher], clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: tuple[_Offer, ...] = ()  # the one that worked last, then the newest first
        self._refused_since: float | None = None

    def __repr__(self) -> str:
        return f"Offers({len(self._offers)}/{OFFERS_MAX})"

    def add(self, offered: Sequence[dict[str, Any]]) -> bool:
        """Take up options, the newest first, behind those that worked last. Returns whether there are new ones among them."""
        with self._lock:
            known = [offer.options for offer in self._offers]
            new = [_Offer(options, self._connect(options)) for options in offered if options not in known]
            self._offers = (*self._offers[:1], *new, *self._offers[1:])[:OFFERS_MAX]
        return bool(new)

    def are_refused(self) -> bool:
        """Whether the object tier has refused all of them for a while: perhaps not who has another environment."""
        since = self._refused_since
        return since is not None and self._clock.monotonic() - since >= REFUSED_S

    def plan(self, draft: Draft, read: ReadRow) -> Sequence[Hint]:
        """See `Publisher.plan`."""
        return self._try(lambda publisher: publisher.plan(draft, read))

    def put_chunk(
        self,
        raw: memoryview,
        hint: Hint,
        rows: Sequence[Row | None],
        *,
        read: ReadRow,
        pace: Callable[[int], None],
    ) -> Row:
        """See `Publisher.put_chunk`."""
        return self._try(lambda publisher: publisher.put_chunk(raw, hint, rows, read=read, pace=pace))

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
        tried: list[Publisher] = []
        # Some may come meanwhile.
        while offer := next((each for each in self._offers if each.publisher not in tried), None):
            tried.append(offer.publisher)
            try:
                done = do(offer.publisher)
            except (ConflictError, CorruptionError, CapacityError):
                self._works(offer)
                raise
            except TierfsError as error:
                if refusal is None and not _is_refusal(error):
                    raise
                refusal = refusal or error
            else:
                self._works(offer)
                return done
        assert refusal is not None
        try:
            self._note(refusal)
            raise refusal
        finally:
            del refusal  # it holds this frame, which would hold it, and all that was lent, until collected

    def _works(self, offer: _Offer) -> None:
        if self._offers[0] is offer and self._refused_since is None:
            return
        with self._lock:
            self._offers = (offer, *(other for other in self._offers if other is not offer))[:OFFERS_MAX]
            self._refused_since = None

    def _note(self, refusal: TierfsError) -> None:
        with self._lock:
            if self._refused_since is None:
                self._refused_since = self._clock.monotonic()
                words = "the object tier refuses whatever clients sent so far (%d sets of options): %s"
                _logger.warning(words, len(self._offers), refusal)


def _is_refusal(error: TierfsError) -> bool:
    """Whether others may fare better than who got this: no rights, credentials that have expired, another endpoint."""
    is_ours = error.tier in {None, "object"}
    return is_ours and isinstance(error, (ReadOnlyError, StoreError)) and not getattr(error, "transient", False)
