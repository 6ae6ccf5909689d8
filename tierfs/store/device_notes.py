"""Notes of this host's processes about their device tiers, for a store's status.

No other process can inspect a process's GPU memory. So each process replaces its note, a small file in the store's
directory, after every save. A note counts while the process that wrote it is alive.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from tierfs.errors import TierfsError
from tierfs.store.store import Store

_PREFIX, _SUFFIX = "device-", ".json"
_SUMMED = (
    "budget_bytes",
    "used_bytes",
    "generations",
    "snapshots",
    "drained_bytes",
    "skipped_bytes",
    "drain_bytes_per_s",
    "registered_bytes",
    "unpinned",
)
_logger = logging.getLogger("tierfs.store")


def leave_note(store: Store, report: Mapping[str, Any]) -> None:
    """Replace this process's note by JSON values: the device tier as `TierWriter.status` shows it.

    The store must have local tiers.
    """
    assert store.tiers is not None
    host = store.tiers.ram.host
    try:
        path = host.store_directory(store.descriptor.uuid) / f"{_PREFIX}{host.owner()}{_SUFFIX}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**report, "written_ns": time.time_ns()}))
        os.replace(new, path)
    except (OSError, TierfsError) as error:
        store.tiers.counters.fall_back(
            "no_device_note", "`tierfs status` does not show the device tier: %s", str(error)
        )


def read_notes(store: Store) -> dict[str, Any] | None:
    """Return the sums over the notes of live processes, or None without any. Delete the notes of dead processes."""
    assert store.tiers is not None
    host = store.tiers.ram.host
    found: list[dict[str, Any]] = []
    for path in host.store_directory(store.descriptor.uuid).glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            if host.is_alive(path.stem.removeprefix(_PREFIX)):
                found.append(json.loads(path.read_text()))
            else:
                path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:  # noqa: PERF203 - one note that cannot be read must not hide the others
            _logger.debug("%s is skipped: %s", path, error)
    if not found:
        return None
    total: dict[str, Any] = {name: sum(int(note.get(name) or 0) for note in found) for name in _SUMMED}
    ages = [_age_s(note) for note in found if note.get("newest_age_s") is not None]
    devices = sorted({str(note["device"]) for note in found if "device" in note})
    return {
        "gives": "none",
        "processes": len(found),
        "device": ", ".join(devices),
        **total,
        "newest_age_s": min(ages) if ages else None,
    }


def _age_s(note: Mapping[str, Any]) -> float:
    return round(float(note["newest_age_s"]) + max(0.0, (time.time_ns() - int(note["written_ns"])) / 1e9), 3)
