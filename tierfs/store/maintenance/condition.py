"""The condition of a store for monitoring: its last gc and scrub on any host, its losses, its newest checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tierfs.errors import NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.manifest import TOMBSTONE_BYTES
from tierfs.format.upkeep import SCRUB_BYTES_MAX, ScrubRecord
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import Prefix, objects_below
from tierfs.store.maintenance.gc_turn import read_collector
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.walk import directory_name

PREFIX_COUNT = 256
DIRECTORIES_MAX = 32
NEWEST_TRIED = 4
_NUMBER = re.compile(r"[0-9]+")


def condition(store: Store) -> dict[str, Any]:
    """Return the store's condition as plain values, for its status.

    A part is missing if it cannot be read, or if its task never ran. If the store has local tiers, the object tier has
    to answer within a moment.

    Returns:
        ``upkeep``: the results of ``gc`` and ``scrub`` as their records have them. ``missing_chunks`` and
        ``vanished_records``: by the newer of the two. ``lost_bytes``: bytes that `repair` moved aside.
        ``checkpoints``: see `newest_checkpoints`.
    """
    bare = store.without_local_tiers()

    def scrubbed() -> dict[str, Any]:
        where = bare.where(keys.SCRUB)
        record, _, _ = read_decoded(bare.objects, keys.SCRUB, SCRUB_BYTES_MAX, ScrubRecord.decode, where)
        times_ns = [state.verified_ns for state in record.prefixes.values()]
        oldest_ns = min(times_ns) if len(times_ns) == PREFIX_COUNT else 0
        return {**record.last, "known_damaged": len(record.damaged), "oldest_ns": oldest_ns} if record.last else {}

    looks: dict[str, Callable[[], Any]] = {
        "gc": lambda: dict(read_collector(bare)[0].last),
        "scrub": scrubbed,
        "lost_bytes": lambda: sum(item.size for item in objects_below(bare.objects, keys.LOST)),
        "checkpoints": lambda: newest_checkpoints(bare),
    }

    def ask(look: Callable[[], Any]) -> Any:
        try:
            return ask_briefly(store, look) if store.tiers is not None else look()
        except TierfsError:
            return {}

    found = {name: value for name, look in looks.items() if (value := ask(look)) != {}}
    upkeep = {name: found.pop(name) for name in ("gc", "scrub") if name in found}
    if upkeep:
        found["upkeep"] = upkeep
    gc, scrub = upkeep.get("gc", {}), upkeep.get("scrub", {})
    for name, key, gc_time in (
        ("missing_chunks", "missing", "succeeded_ns"),
        ("vanished_records", "vanished", "ended_ns"),
    ):
        known = [(gc.get(gc_time, 0), gc.get(key)), (scrub.get("looked_ns", 0), scrub.get(key))]
        newest = max(((time, count) for time, count in known if count is not None), default=None)
        if newest is not None:
            found[name] = newest[1]
    return found


def newest_checkpoints(store: Store) -> dict[str, dict[str, int]]:
    """Return the newest complete checkpoint of each run: its step, and when the object tier got its metadata.

    A run is a directory whose subdirectories have numbers in their names, such as ``step_100``. This lists at most
    `DIRECTORIES_MAX` directories from the root on, and looks at the `NEWEST_TRIED` highest steps of each.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    found: dict[str, dict[str, int]] = {}
    left = [""]
    for _ in range(DIRECTORIES_MAX):
        if not left:
            break
        directory = left.pop(0)
        listed = store.objects.list(keys.directory_prefix(directory), delimiter=True)
        names = [name for item in listed if isinstance(item, Prefix) and (name := directory_name(item.key))]
        steps = sorted(((int(numbers[-1]), name) for name in names if (numbers := _NUMBER.findall(name))), reverse=True)
        for step, name in steps[:NEWEST_TRIED]:
            try:
                info = store.objects.head(keys.record_key(keys.inside(directory, f"{name}/{ROOT}")))
            except NotFoundError:
                continue
            if info.size != TOMBSTONE_BYTES:
                found[directory] = {"step": step, "published_ns": info.modified_ns}
                break
        else:
            left += [keys.inside(directory, name) for name in names]
    return found
