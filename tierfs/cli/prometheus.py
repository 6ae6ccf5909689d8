"""A store's status as Prometheus reads it: its text format, version 0.0.4.

Names follow its rules: a ``tierfs_`` in front, base units (bytes, seconds), ``_total`` for what only grows. Every sample
has a ``store`` label, those of a tier a ``tier`` label too.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["exposition"]

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
_SECONDS = re.compile(r"_s$")

# For the whole store: key of the status, name, help.
_STORE_GAUGES = (
    ("queue_files", "queue_files", "Files that are not in the object tier yet."),
    ("queue_bytes", "queue_bytes", "Bytes of the files that are not in the object tier yet."),
    ("oldest_age_s", "queue_oldest_age_seconds", "How long the oldest of these files has been known to the flusher."),
    ("rate_bytes_per_s", "upload_bytes_per_second", "Bytes that went to the object tier lately, per second."),
    ("unreadable_drafts", "unreadable_drafts", "Drafts in the ram tier that cannot be read."),
    (
        "unread_segments",
        "unread_segments",
        "Segments of the ram tier that cannot be opened: what is in them is not known.",
    ),
)
# The same, of a key that a flusher gives, else the length of a list: a flusher does not list all.
_STORE_COUNTS = (
    (
        "conflict_files",
        "conflicts",
        "Files that another writer changed before they were flushed; kept until discarded.",
    ),
    ("failing_files", "errors", "Files whose last way down failed; it is tried again."),
)
# For a tier: counters, then gauges.
# What is said of the last gc and the last scrub: keys of the status, name, help.
_UPKEEP_GAUGES = (
    (("gc", "unreadable_count"), "gc_unreadable_records", "Records that kept the last gc from deleting anything."),
    (("gc", "deleted", "bytes"), "gc_last_deleted_bytes", "Bytes of chunk objects that the last gc deleted."),
    (("gc", "condemned", "bytes"), "gc_last_condemned_bytes", "Bytes that the last gc found to be of no use any more."),
    (("gc", "reached", "bytes"), "gc_reached_bytes", "Bytes of chunk objects that files needed at the last gc."),
    (("scrub", "known_damaged"), "scrub_damaged_chunks", "Chunk objects that are known to be damaged."),
    (("scrub", "bytes"), "scrub_last_bytes", "Bytes that the last scrub verified."),
)
_TIER_COUNTERS = {
    "evicted_bytes": "Bytes of clean copies that were dropped for room.",
    "drained_bytes": "Bytes that went from GPU memory to the ram tier.",
    "skipped_bytes": "Bytes in GPU memory that did not have to, because the ram tier had them.",
    "waited_s": "How long writers waited for room.",
    "waits": "How often a writer waited for room.",
}
_TIER_GAUGES = {
    "budget_bytes": "Bytes that the tier may hold.",
    "chunks": "Chunks that the tier holds.",
    "clean_bytes": "Bytes that may be dropped: another tier has them.",
    "conflicts": "Drafts that the tier keeps because of a conflict.",
    "damaged": "Drafts that lack a chunk.",
    "dirty_bytes": "Bytes that the object tier does not have yet.",
    "drafts": "Drafts that the tier holds.",
    "drain_bytes_per_s": "Bytes that go from GPU memory to the ram tier, per second.",
    "generations": "Snapshots that there is GPU memory for.",
    "host_bytes": "Bytes that all stores of this host take of the tier.",
    "newest_age_s": "How old the newest snapshot is.",
    "registered_bytes": "Bytes of shared memory that are registered with a GPU.",
    "segments": "Segments of shared memory.",
    "snapshots": "Snapshots in GPU memory.",
    "store_bytes": "Bytes that this store's segments take.",
    "unpinned": "Regions of shared memory that could not be registered with a GPU.",
    "used_bytes": "Bytes that the tier holds.",
}
# For the requests to a tier, by process and by method.
_REQUEST_COUNTERS = {
    "requests": ("requests", "Requests to the tier."),
    "errors": ("request_errors", "Requests that failed after all attempts."),
    "bytes": ("request_bytes", "Bytes of objects in requests that succeeded."),
    "seconds": ("request_seconds", "How long requests were waited for, added up."),
}


@dataclass(slots=True)
class _Family:
    kind: str
    text: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)


def exposition(report: Mapping[str, Any]) -> str:
    """Write a store's status in Prometheus's text format.

    Args:
        report: From `tierfs.store.status`. Missing values, and values of an unexpected kind, are left out.
    """
    families: dict[str, _Family] = {}
    store = {"store": str(report["store"])}

    def add(name: str, kind: str, text: str, value: object, **labels: str) -> None:
        if isinstance(value, (int, float)):
            family = families.setdefault(f"tierfs_{name}", _Family(kind, text))
            family.samples.append(({**store, **labels}, float(value) if isinstance(value, float) else int(value)))

    for key, name, text in _STORE_GAUGES:
        add(name, "gauge", text, report.get(key))
    for key, listed, text in _STORE_COUNTS:
        add(key, "gauge", text, report.get(key, len(report.get(listed, ()))))
    running = report.get("flusher", {}).get("running")
    add("flusher_running", "gauge", "Whether a flusher runs for the store on this host.", running)
    for tier, values in report.get("tiers", {}).items():
        gives = str(values.get("gives", ""))
        add("tier_info", "gauge", "1; the label gives says which level the tier gives.", 1, tier=tier, gives=gives)
        for key, text in _TIER_GAUGES.items():
            add(f"tier_{_base(key)}", "gauge", text, values.get(key), tier=tier)
        for key, text in _TIER_COUNTERS.items():
            add(f"tier_{_base(key)}_total", "counter", text, values.get(key), tier=tier)
        text = "How often the tier used a fallback."
        for what, count in values.get("fallbacks", {}).items():
            add("tier_fallbacks_total", "counter", text, count, tier=tier, fallback=what)
        for asked, counts in values.get("requests", {}).items():
            who, _, method = asked.partition("_")
            for key, (name, text) in _REQUEST_COUNTERS.items():
                add(f"tier_{name}_total", "counter", text, counts.get(key), tier=tier, by=who, method=method)
    upkeep = report.get("upkeep", {})
    for keys, name, text in _UPKEEP_GAUGES:
        add(name, "gauge", text, _at(upkeep, keys))
    for what in ("gc", "scrub"):
        ended_ns = _at(upkeep, (what, "ended_ns"))
        if isinstance(ended_ns, int):
            text = f"When the last {what} of the store ended, whoever ran it."
            add(f"{what}_last_end_timestamp_seconds", "gauge", text, ended_ns / 1e9)
    for key, count in report.get("counters", {}).items():
        who, _, what = key.partition("_")
        by = "the flusher" if who == "flusher" else f"the {who} that was asked"
        name, text = f"{_base(key)}_total", f"Counted by {by} since it began: {what.replace('_', ' ')}."
        add(name, "counter", text, count)
    return "".join(_lines(name, family) for name, family in families.items())


def _at(values: Any, keys: Sequence[str]) -> object:
    """A value some levels down; ``None`` if it is not there."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _base(key: str) -> str:
    """A key as the middle of a name, in base units."""
    return _SECONDS.sub("_seconds", _NO_NAME.sub("_", key))


def _lines(name: str, family: _Family) -> str:
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {family.kind}"]
    for labels, value in family.samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    # Names of files may be invalid Unicode, which cannot be sent.
    value = value.encode(errors="backslashreplace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
