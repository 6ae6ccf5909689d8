"""The results of a store's last gc and last scrub, on any host: for people and for monitoring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierfs.errors import TierfsError
from tierfs.format import keys
from tierfs.format.scrubbed import SCRUB_BYTES_MAX, ScrubRecord
from tierfs.objects.checksums import read_decoded
from tierfs.store.maintenance.gc_turn import read_collector
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store


def last_upkeep(store: Store) -> dict[str, Any]:
    """Return the results under ``gc`` and ``scrub``, as their records have them.

    A result is missing if the task never ran or its record cannot be read. If the store has local tiers, the object
    tier has to answer within a moment.
    """
    bare = store.without_local_tiers()

    def scrubbed() -> dict[str, Any]:
        where = bare.where(keys.SCRUB)
        record, _, _ = read_decoded(bare.objects, keys.SCRUB, SCRUB_BYTES_MAX, ScrubRecord.decode, where)
        return {**record.last, "known_damaged": len(record.damaged)}

    def collected() -> dict[str, Any]:
        return dict(read_collector(bare)[0].last)

    found: dict[str, Any] = {}
    looks: dict[str, Callable[[], dict[str, Any]]] = {"gc": collected, "scrub": scrubbed}
    for name, look in looks.items():
        try:
            values = ask_briefly(store, look) if store.tiers is not None else look()
        except TierfsError:
            continue
        if values:
            found[name] = values
    return found
